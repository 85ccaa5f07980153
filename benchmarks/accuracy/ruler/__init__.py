"""The 13 task types of RULER (Hsieh et al., 2024) at any length, with our own words, facts and texts.

RULER takes its questions from SQuAD and HotpotQA and its haystack from essays. None of them is at hand, so questions
are about generated facts and the haystack is generated prose, or a text that the user names. Scores are therefore
comparable between selections, not with published ones.
"""

from benchmarks.accuracy.ruler.question import Question
from benchmarks.accuracy.ruler.tasks import TASKS, Task, fit_question

__all__ = ["TASKS", "Question", "Task", "fit_question"]
