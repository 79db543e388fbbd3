"""A thinking budget read token by token equals its definition on the whole sequence."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.scheduling.constrained_canvas import ThinkingBudget

# Few tokens, so that marks occur, in one another's middle too.
TOKENS = st.lists(st.integers(0, 3), max_size=24)
MARK = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)


def _ends(tokens: list[int], mark: tuple[int, ...]) -> list[int]:
    """Return the numbers of tokens after which a ``mark`` has been read."""
    ends = range(len(mark), len(tokens) + 1)
    return [end for end in ends if tuple(tokens[end - len(mark) : end]) == mark]


@given(TOKENS, TOKENS, MARK, MARK, MARK, st.integers(0, 8))
def test_definition(
    prompt: list[int],
    answer: list[int],
    start: tuple[int, ...],
    end: tuple[int, ...],
    transition: tuple[int, ...],
    most: int,
) -> None:
    """The token that is due after an answer follows the definition, wherever the answer is cut."""
    forced = transition + end
    tokens = prompt + answer
    ended = max(_ends(tokens, end), default=0)
    began = min((place for place in _ends(tokens, start) if place > ended), default=0)
    expected = None
    if began:
        length = len(tokens) - began
        if began <= len(prompt):
            # What the prompt thought beyond the budget is not held against the answer.
            length -= max(len(prompt) - began - most, 0)
        if most <= length < most + len(forced):
            expected = forced[length - most]
    fresh = ThinkingBudget(most, start, end, forced).after_prompt(prompt)
    for cut in range(len(answer) + 1):
        assert fresh.after(answer[:cut]).after(answer[cut:]).token_due() == expected


@given(TOKENS, st.integers(0, 8), MARK)
def test_an_obedient_answer_ends_its_thought(
    words: list[int], most: int, transition: tuple[int, ...]
) -> None:
    """An answer that emits each due token ends its thought after budget, transition and mark."""
    start, end = (4,), (5,)
    budget = ThinkingBudget(most, start, end, transition + end).after_prompt([0, 4])
    said = []
    for word in words + [0] * 24:
        due = budget.token_due()
        budget.read(word if due is None else due)
        said.append(word if due is None else due)
    assert said.index(5) == most + len(transition)
