"""The 13 task types of RULER (Hsieh et al., 2024) at any length, with our own words, facts and texts.

RULER takes its questions from SQuAD and HotpotQA and its haystack from essays. None of them is at hand, so questions
are about generated facts and the haystack is generated prose, or a text that the caller names. Scores are therefore
comparable between selections, not with published ones.
"""

from vllm_hybrid_sparse.load.ruler.question import Question
from vllm_hybrid_sparse.load.ruler.tasks import TASKS, Task, fit_question, shortest_question

__all__ = ["TASKS", "Question", "Task", "fit_question", "shortest_question"]
