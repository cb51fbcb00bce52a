r"""Equality of mathematical answers as people spell them: `x=4`, `25\%`, `11_{2}`, `(1, 2]`, `5 cm`, `Paris`.

Owns the structure around a formula: where the final answer of a response is, delimiters, assignments, lists,
intervals, bases, words. `math_values` compares numbers, units and formulas.

A reference and a response are read by the same rules, so that a reference always equals itself. The response
may leave out a unit, a percent sign, a base or `x=` that the reference carries; a different one is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from olmo_rl.tasks.math_values import TEXT, equal_formulas, equal_quantities

_SPAN = r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|(?<![\\\d])\$[^$\n]+?(?<!\\)\$"
_SPANS = re.compile(
    rf"(?:{_SPAN})(?:\s*(?:,|,?\s*and|,?\s*or)?\s*(?:{_SPAN}))*\s*(?:\\?%|percent\b)?", re.DOTALL
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\[", r"\]"), (r"\(", r"\)"))
_PHRASE = re.compile(r"(?:answer(?:\s+(?:is|are))?|####)\s*:?\s*(?=\S)", re.IGNORECASE)
_SAID = re.compile(
    r"\b(?:is|are|was|be|gets?|gives|equals|yields|obtain|choose|say)\b:?\s+(?!not\b)([^,;:]+)$|[:=]\s*([^,;:=]+)$"
)
# Words of prose around a formula; names of functions and \commands are none.
_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt pi deg gcd lcm max min"
)
_TWO = "is of to so we it in be at as if by an on no do he she they"
_WORD = re.compile(
    rf"(?<![\\A-Za-z{{])(?!(?:{'|'.join(_FUNCTIONS.split())}|and|or)\b)"
    rf"(?:[A-Za-z]{{3,}}(?![A-Za-z_^(])|(?:{'|'.join(_TWO.split())})\b)",
)
_CHARACTERS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "±": r"\pm ", "√": r"\sqrt ", "∪": r"\cup ",
    "∈": r"\in ", "½": r"\frac{1}{2}", "²": "^2", "³": "^3", "∅": r"\emptyset ",
}  # fmt: skip
_SPACING = re.compile(
    r"(?<!\\)\\[,;:! ]|~|\\q?quad\b|\\(?:left|right|displaystyle|bigl?|bigr)(?![A-Za-z])|\{,\}(?!\d{3})"
)
_THOUSANDS = re.compile(
    r"(?<![\d.,])\d{1,3}(?:(?:,(?:\\!\s*)?|\{,\}|\\,|\\!)\d{3})+(?![\d,])|(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)"
)
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\d])(\d+\.?\d*|\.\d+)\s*[eE]([+-]?\d+)(?![\d.A-Za-z])")
_MIXED = re.compile(r"(?<![\d./])(-?)(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])")
_BASED = re.compile(r"^\(?([0-9A-Za-z]+)\)?_\{?(\d+)\}?$")
_CLOCK = re.compile(r"^\d{1,2}:[0-5]\d$")
_CHOICES = re.compile(r"\\text\s*\{\s*([A-Z](?:\s*,\s*[A-Z])+)\s*\}")  # of a multiple-choice question
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SOLUTION = re.compile(r"####|\\(?:boxed|fbox)\b")
_SIGNS = re.compile(r"\\pm(?![A-Za-z])")
_LEFT = re.compile(r"^(?:[A-Za-z](?:_\{?\w+\}?)?'*|\\[a-z]+)(?:\([A-Za-z, ]+\))?$")


def equal_answers(response: str, answer: str) -> bool:
    """Whether the final answer of `response` equals the reference `answer`."""
    gold = _bare(answer)
    return any(_equal(gold, _bare(given)) for given in _final(response, gold=gold))


def reference_fault(answer: str) -> str | None:
    """Why a reference cannot be read; None where it can."""
    bare = _bare(answer)
    if not bare:
        return "it is empty"
    if (found := _SOLUTION.search(bare)) is not None:
        return f"it is a whole solution with {found[0]}: give the final answer alone"
    plain = re.sub(r"\\[\\{}]", "", answer)
    if plain.count("{") != plain.count("}"):
        return "its { and } do not match"
    if len(re.findall(r"\\left(?![a-z])", answer)) != len(re.findall(r"\\right(?![a-z])", answer)):
        return r"its \left and \right do not match"
    return None


def _final(response: str, *, gold: str) -> Iterator[str]:
    """The final answer, of the last <answer>...</answer> where there is one: the last box, else behind the
    last "answer is", else the last formula, else the last line. Prose around a formula is left out; a second
    reading keeps it, for references made of words.
    """
    if tagged := _TAGGED.findall(response):
        response = tagged[-1]
    boxed = _boxed(response)
    if boxed is not None:
        yield boxed
        return
    phrase = [match.end() for match in _PHRASE.finditer(response)]
    lines = response[phrase[-1] if phrase else 0 :].strip().splitlines() or [""]
    line = (lines[0] if phrase else lines[-1]).strip().strip("*").strip()
    if _is_words(gold):
        yield line
        if (said := _SAID.search(line)) is not None:
            yield said[1] or said[2]
        return
    spans = [match[0] for match in _SPANS.finditer(response[phrase[-1] if phrase else 0 :])]
    if spans:
        yield spans[-1]
        return
    yield _without_prose(line)


def _boxed(text: str) -> str | None:
    r"""The contents of the last \boxed{...}; None without one."""
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start)
    depth = 0
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
        if depth == 0:
            return text[begin + 1 : place]
    return text[begin + 1 :]


def _without_prose(line: str) -> str:
    """The last stretch of `line` that reads as a formula, with the unit behind it."""
    hidden = TEXT.sub(lambda match: "\0" * len(match[0]), line)
    words = [match.span() for match in _WORD.finditer(hidden)]
    if not words:
        return line
    edges = [(0, 0), *words, (len(line), len(line))]
    stretches = [(left[1], right[0]) for left, right in zip(edges, edges[1:], strict=False)]
    for start, end in reversed(stretches):
        stretch = line[start:end].strip().strip(",;:").strip()
        if re.search(r"[\dA-Za-z]", stretch):
            following = re.match(r"[A-Za-z]+(?=[.!]?$)", line[end:])  # a unit, where nothing else follows
            return stretch if following is None else f"{stretch} {following[0]}"
    return line


def _bare(text: str) -> str:
    """`text` without delimiters, spacing commands and sentence marks, in the spelling that LaTeX has."""
    text = text.strip()
    while True:
        before = text
        text = text.strip().rstrip(".").strip() if not text.endswith("...") else text
        boxed = _boxed(text) if text.startswith((r"\boxed{", r"\fbox{")) and text.endswith("}") else None
        text = text if boxed is None else boxed.strip()
        for left, right in _DELIMITERS:
            inner = text[len(left) : len(text) - len(right)]
            if (
                text.startswith(left)
                and text.endswith(right)
                and inner
                and left not in inner
                and len(text) > len(left)
            ):
                text = inner.strip()
        if text == before:
            break
    for span in _DELIMITERS:
        if span[0] != "$" or text.count("$") > text.count(r"\$") + 1:
            text = _undelimited(text, span)
    for character, spelling in _CHARACTERS.items():
        text = text.replace(character, spelling)
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _SPACING.sub(lambda match: "" if match[0].startswith((r"\l", r"\r", r"\!", r"\b")) else " ", text)
    text = (
        text.replace(r"\dfrac", r"\frac")
        .replace(r"\tfrac", r"\frac")
        .replace(r"\lbrace", r"\{")
        .replace(r"\rbrace", r"\}")
        .replace(r"\varnothing", r"\emptyset")
    )
    if (letters := _CHOICES.fullmatch(text)) is not None:
        text = letters[1]
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    text = _MIXED.sub(r"\1\2\\frac{\3}{\4}", text)
    return re.sub(r"\s+", " ", text).strip()


def _undelimited(text: str, span: tuple[str, str]) -> str:
    if span[0] in ("$", "$$"):
        return re.sub(r"(?<!\\)\$", "", text)
    return text.replace(span[0], "").replace(span[1], "")


def _equal(gold: str, given: str) -> bool:
    """Whether two bare answers are equal: as text, as lists and intervals of equal parts, as based numerals,
    as quantities, as formulas.
    """
    if _words(gold) == _words(given):
        return bool(gold)
    if not gold or not given or _is_words(gold) or _is_words(given):
        return False
    if _CLOCK.match(gold) and _CLOCK.match(given):
        return gold.lstrip("0") == given.lstrip("0")
    parts = _alternatives(gold)
    if parts is not None or _alternatives(given) is not None or r"\pm" in gold + given:
        others = _alternatives(given)
        return _same_parts(parts or [gold], others or [given], ordered=False)
    if (verdict := _equal_sides(gold, given)) is not None:
        return verdict
    if (verdict := _equal_lists(gold, given)) is not None:
        return verdict
    if (verdict := _equal_numerals(gold, given)) is not None:
        return verdict
    return equal_quantities(gold, given)


def _words(text: str) -> str:
    """Text for comparison: letters in one case, no markup, no parentheses around one letter."""
    plain = TEXT.sub(r"\1", text).replace("\\", "").strip(" .*")
    plain = re.sub(r"^\(([A-Za-z])\)$", r"\1", plain)
    if _is_words(text):
        return re.sub(r"^(?:an?|the) (?=[^\W\d_]{3})", "", re.sub(r"\s+", " ", plain).casefold())
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", plain).casefold()  # "1 2" is not 12


def _is_words(text: str) -> bool:
    r"""Whether the answer is a word and not a formula: \text{...} alone, or letters that are no product."""
    if re.fullmatch(TEXT, text.strip()) and not re.match(r"\s*[-\d.]", TEXT.sub(r"\1", text)):
        return True
    letters = text.strip().strip(".")
    if not re.fullmatch(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*", letters) or letters in _FUNCTIONS.split():
        return False
    return len(letters) > 3 or (len(letters) > 1 and re.search("[eiou]", letters.casefold()) is not None)


def _split(text: str, *, at: str) -> list[str]:
    """Parts of `text` between matches of `at` outside of all brackets."""
    parts, depth, last = [], 0, 0
    for match in re.finditer(rf"\\[{{}}]|[\[\](){{}}]|{at}", text):
        found = match[0]
        if found in ("(", "[", "{", r"\{"):
            depth += 1
        elif found in (")", "]", "}", r"\}"):
            depth -= 1
        elif depth == 0:
            parts.append(text[last : match.start()].strip())
            last = match.end()
    return [*parts, text[last:].strip()]


def _alternatives(text: str) -> list[str] | None:
    """Parts of a list without brackets or a union; None where there is only one."""
    if r"\begin" in text:
        return None
    text = TEXT.sub(lambda match: match[1] if match[1].strip() in ("and", "or") else match[0], text)
    parts = [part for part in _split(text, at=r",\s*and\b|,\s*or\b|\band\b|\bor\b|[,;]|\\cup\b") if part]
    return parts if len(parts) > 1 else None


def _equal_sides(gold: str, given: str) -> bool | None:
    """Equations: the right sides, where the left ones agree or one answer has none. None: no equation."""
    membership = r"(?<![<>!\\])=|\\in\b"
    golds, givens = _split(gold, at=membership), _split(given, at=membership)
    if len(golds) == len(givens) == 1:
        return None
    if len(golds) == 1:
        turned = _LEFT.match(givens[-1]) is not None and _LEFT.match(givens[0]) is None  # 4 = x
        return _equal(gold, givens[0 if turned else -1])
    if not _LEFT.match(golds[0]):
        return equal_formulas(gold, given)
    if len(givens) == 1 or _words(golds[0]) == _words(givens[0]):
        return _equal(golds[-1], givens[-1])
    return None if _LEFT.match(givens[0]) is None and equal_formulas(gold, given) else False


def _bracketed(text: str) -> tuple[str, str, list[str]] | None:
    """The brackets of a tuple, an interval or a set, and its parts; None for everything else."""
    match = re.fullmatch(r"(\\\{|[\[({])(.*)(\\\}|[\])}])", text, re.DOTALL)
    if match is None:
        return None
    parts = _split(match[2], at=r"[,;]")
    kinds = {r"\{": "{", r"\}": "}"}
    left, right = kinds.get(match[1], match[1]), kinds.get(match[3], match[3])
    if (len(parts) < 2 and left != "{") or "" in parts or r"\mid" in match[2]:
        return None
    return left, right, parts


def _equal_lists(gold: str, given: str) -> bool | None:
    """Tuples, intervals and sets by their brackets and parts; None where neither is one."""
    ours, theirs = _bracketed(gold), _bracketed(given)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        single = ours or theirs
        assert single is not None, "one of them is a list"
        if single[0] == "{" and len(single[2]) == 1:
            other = given if theirs is None else gold
            return _equal(single[2][0], other) if theirs is None else _equal(other, single[2][0])
        return None
    return ours[:2] == theirs[:2] and _same_parts(ours[2], theirs[2], ordered=ours[0] != "{")


def _same_parts(golds: list[str], givens: list[str], *, ordered: bool) -> bool:
    if len(golds) == 1 and not ordered:  # x = \pm 2 against 2, -2; {1, 2} against 1, 2
        golds = _expanded(golds[0])
    if len(givens) == 1 and not ordered:
        givens = _expanded(givens[0])
    if len(golds) != len(givens):
        return False
    if ordered:
        return all(_equal(gold, given) for gold, given in zip(golds, givens, strict=True))
    left = list(givens)
    for gold in golds:
        found = next((i for i, given in enumerate(left) if _equal(gold, given)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _expanded(text: str) -> list[str]:
    right = _split(text, at="(?<![<>!])=|\\\\in\\b")[-1]
    listed = _bracketed(right)
    if listed is not None and listed[0] == "{":
        return listed[2]
    if len(re.findall(_SIGNS, right)) == 1:
        return [re.sub(_SIGNS, sign, right).strip().removeprefix("+").strip() for sign in ("+", "-")]
    return [text]


def _equal_numerals(gold: str, given: str) -> bool | None:
    """Numerals with a base by value; digits without one are read in the reference's. None: no base."""
    ours, theirs = _BASED.match(gold), _BASED.match(given)
    if ours is None:
        return None
    digits, base = (theirs[1], theirs[2]) if theirs is not None else (given, ours[2])
    try:
        return int(ours[1], int(ours[2])) == int(digits, int(base))
    except ValueError:  # a variable with an index, or digits beyond the base
        return None if theirs is None or ours[1].isalpha() else False
