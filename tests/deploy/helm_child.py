"""Runs Helm's library in a process of its own, which Go's runtime then has to itself.

python -m tests.deploy.helm_child render|lint|merge|refusal CHART < VALUES.json
"""

import json
import sys

import helm_python


def main() -> None:
    """Print what the library answers as JSON; `refusal` prints the error's text, empty where the values are legal."""
    action, chart = sys.argv[1:]
    values = json.load(sys.stdin)
    if action == "lint":
        answer = helm_python.lint(chart, values)
    elif action == "merge":
        answer = helm_python.Chart.load(chart).merge_values(values)
    elif action == "refusal":
        try:
            helm_python.Chart.load(chart).validate_schema(values)
            answer = ""
        except helm_python.HelmError as error:
            answer = str(error)
    else:
        answer = helm_python.Chart.load(chart).render(values, name="chat")
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
