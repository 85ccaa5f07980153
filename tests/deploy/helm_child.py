"""Runs Helm's library in a separate process, so that Go's runtime has that process to itself.

python -m tests.deploy.helm_child render|lint|merge|refusal CHART RELEASE < VALUES.json
"""

import json
import sys

import helm_python


def main() -> None:
    """Print the library's answer as JSON. `refusal` prints the error's text, empty if the chart renders."""
    action, chart, release = sys.argv[1:]
    values = json.load(sys.stdin)
    if action == "lint":
        answer = helm_python.lint(chart, values)
    elif action == "merge":
        answer = helm_python.Chart.load(chart).merge_values(values)
    elif action == "refusal":
        try:
            helm_python.Chart.load(chart).render(values, name=release)
            answer = ""
        except helm_python.HelmError as error:
            answer = str(error)
    else:
        answer = helm_python.Chart.load(chart).render(values, name=release)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
