"""Equality of numbers, quantities with units, and formulas of an answer.

math-verify (`pip install 'olmo_rl[math]'`) reads formulas and compares symbolic ones. Numbers are compared
here, exactly: a decimal equals another only if all digits agree, a number without a finite decimal form
within a relative `TOLERANCE` (math-verify rounds to six decimals, so that all numbers below 1e-6 are equal).
Formulas that would take minutes to evaluate (towers of powers, big factorials) equal nothing.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

TOLERANCE = 1e-6  # relative, of numbers without a finite decimal form
LONGEST = 1000  # characters of a formula that is read

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_PERIODIC = re.compile(r"^(-?)(\d*)\.(\d*)\\overline\{(\d+)\}$")
_PERCENT = re.compile(r"\s*(?:\\?%|\bper\s?cent\b|\bpercentage points?\b)\s*$", re.IGNORECASE)
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*$")
_UNIT = re.compile(
    r"^(.*[\d\})!])\s*((?:[A-Za-z][A-Za-z.]+|[a-zA-Z](?=\^|/|$))(?:[\s/*^\d{}A-Za-z.-]*))$", re.DOTALL
)
_CURRENCY = re.compile(r"^(-?)\s*(?:\\?\$|[€£¥₹])\s*(?=[\d.-])")
_HUGE = re.compile(
    r"\^\s*\{?\s*[-\d.]*\s*\d{5}|\^\s*\{[^{}]*\d[^{}]*\^|\^\s*\d+\s*\^|\d{4}\s*!|!\s*!|\)\s*!|\}\s*!"
)
# Exceptions of sympy for formulas that it cannot evaluate: these equal nothing.
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def equal_quantities(gold: str, given: str) -> bool:
    """A number with a unit, a percent sign or neither: the number, and the unit where both have one."""
    (number, unit), (other, theirs) = _quantity(gold), _quantity(given)
    if unit == theirs or not unit or not theirs:
        return equal_formulas(number, other) or (
            unit != theirs
            and "%" in (unit, theirs)
            and equal_formulas(_percent(number, unit), _percent(other, theirs))
        )
    factor = _conversion(unit, theirs)
    return factor is not None and equal_formulas(number, rf"({other}) \cdot {factor}")


def _percent(number: str, unit: str) -> str:
    return rf"\frac{{{number}}}{{100}}" if unit == "%" else number


def _quantity(text: str) -> tuple[str, str]:
    """A number and its unit, "" without one; "%" and "deg" stand for all spellings of percent and degrees."""
    money = _CURRENCY.sub(r"\1", re.sub(r"^(-?[\d.]+)\s*([€£¥₹])$", r"\2\1", text))
    if money != text:
        return _quantity(money)[0], "dollar"
    if (match := _PERCENT.search(text)) is not None and match.start() > 0:
        return text[: match.start()], "%"
    if (match := _DEGREES.search(text)) is not None and match.start() > 0:
        return text[: match.start()], "deg"
    plain = TEXT.sub(
        lambda match: f" {match[1]} " if re.search("[A-Za-z]", match[1]) else match[1], text
    ).strip()
    if (match := _UNIT.match(plain)) is not None:
        named = plain != text or re.search(r"\s[A-Za-z]{3}", match[0]) or _known_unit(match[2]) is not None
        if named:
            return match[1].strip(), _singular(match[2])
    return text, ""


def _singular(unit: str) -> str:
    unit = re.sub(r"[{}.]", "", unit).strip()
    lower = unit if len(unit) < 3 else unit.casefold()
    named = {
        "degree": "deg",
        "degrees": "deg",
        "degs": "deg",
        "dollars": "dollar",
        "feet": "foot",
        "percent": "%",
    }
    if lower in named:
        return named[lower]
    return lower[:-1] if len(lower) > 3 and lower.endswith("s") and not lower.endswith("ss") else lower


@cache
def _known_unit(name: str) -> Any:
    """The unit of sympy that `name` means, also with powers and quotients (cm, meters, km/h, m^2), in units
    of the SI; else None.
    """
    from sympy.physics import units

    words, short = (
        {"square": 2, "sq": 2, "cubic": 3},
        {"h": "hour", "hr": "hour", "sec": "second", "min": "minute", "in": "inch"},
    )
    first, _, rest = re.sub(r"\s+\^", "^", re.sub(r"[{}.]", "", name)).strip().partition(" ")
    power = words.get(first, 1) if rest else 1
    product: Any = 1
    for index, part in enumerate((rest if power > 1 else f"{first} {rest}".strip()).split("/")):
        base, _, exponent = part.strip().partition("^")
        base = short.get(base, base)
        found = getattr(units, base, None) or getattr(units, _singular(base), None)
        if not isinstance(found, units.Quantity) or (exponent and not exponent.isdigit()):
            return None
        product *= found ** (int(exponent or 1) * power * (-1 if index else 1))
    base_units = [units.meter, units.kilogram, units.second, units.ampere, units.kelvin, units.mole]
    return units.convert_to(product, base_units)


def _conversion(unit: str, theirs: str) -> Any:
    """The number of `unit` in one `theirs`; None where they measure different things or are unknown."""
    from sympy import simplify

    ours, other = _known_unit(unit), _known_unit(theirs)
    factor = None if ours is None or other is None else simplify(other / ours)
    return factor if factor is not None and factor.is_number else None


def equal_formulas(gold: str, given: str) -> bool:
    """Two formulas by math-verify; two numbers by value."""
    from math_verify import verify

    try:
        ours, theirs = _parsed(gold), _parsed(given)
        if ours is None or theirs is None:
            return False
        exact, other = _number(ours), _number(theirs)
        if exact is not None and other is not None:
            return _equal_values(exact, other)
        return bool(verify([ours], [theirs], timeout_seconds=None))
    except _UNREADABLE:
        return False


def _parsed(formula: str) -> Any:
    """The value that math-verify reads: an expression, a relation, a set or a matrix; None where it reads
    nothing.
    """
    from math_verify import LatexExtractionConfig, parse

    if len(formula) > LONGEST or _HUGE.search(formula):
        return None
    if (match := _PERIODIC.match(formula.replace(" ", ""))) is not None:
        sign, whole, head, period = match.groups()
        shift, nines = 10 ** len(head), 10 ** len(period) - 1
        top = int((whole or "0") + head) * nines + int(period)
        formula = rf"{sign}\frac{{{top}}}{{{shift * nines}}}"
    formula = _ascending(formula)
    found = parse(rf"\boxed{{{formula}}}", [LatexExtractionConfig()], parsing_timeout=None)
    return None if not found or isinstance(found[0], str) else found[0]


def _ascending(formula: str) -> str:
    """3 > x > 1 as 1 < x < 3, the only direction that math-verify reads as one chain."""
    signs = {">": " < ", r"\ge": r" \le ", r"\geq": r" \le "}
    found = re.findall(r"\\geq?(?![a-z])|>", formula)
    if len(found) < 2 or re.search(r"<|\\le(?![a-z])|\\leq(?![a-z])", formula):
        return formula
    parts = re.split(r"\\geq?(?![a-z])|>", formula)
    chain = [parts[-1]]
    for sign, part in zip(reversed(found), reversed(parts[:-1]), strict=True):
        chain += [signs[sign], part]
    return "".join(chain)


def _number(value: Any) -> Any:
    """A number of sympy with decimals as fractions; None for everything else."""
    import sympy

    if not isinstance(value, sympy.Expr) or value.free_symbols or not value.is_number:
        return None
    decimals = {part: sympy.Rational(str(part)) for part in value.atoms(sympy.Float)}
    value = value.xreplace(decimals).doit()
    return value if value.is_finite else None


def _equal_values(ours: Any, theirs: Any) -> bool:
    if ours.is_Rational and theirs.is_Rational and all(_terminates(value.q) for value in (ours, theirs)):
        return bool(ours == theirs)
    if ours == theirs:
        return True
    if ours.is_Integer and theirs.is_Integer:
        return False
    difference, size = abs((ours - theirs).evalf(20)), abs(ours.evalf(20))
    return bool(difference <= TOLERANCE * size)


def _terminates(denominator: int) -> bool:
    """Whether a fraction has a finite decimal form."""
    for factor in (2, 5):
        while denominator % factor == 0:
            denominator //= factor
    return denominator == 1
