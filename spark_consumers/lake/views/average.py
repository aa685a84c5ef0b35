"""PostgreSQL's `avg` of integers and numerics, digit by digit. Pure.

It is a numeric's quotient, whose digits behind the point depend on both operands (`select_div_scale` in PostgreSQL's numeric.c): at least
16 significant ones, by the positions of the operands' first digits in base 10000; then it is rounded half away from zero.
"""

from decimal import Decimal

_SIGNIFICANT, _GROUP = 16, 4


def average(total: str | None, count: int | None, scale: int) -> str | None:
    """`total / count` as PostgreSQL prints it; `scale`: of the total. NULL of no values."""
    if total is None or not count:
        return None
    # Not by `scaleb`, which rounds to the digits of the context.
    is_negative, figures, exponent = Decimal(total).as_tuple()
    units = int("".join(map(str, figures))) * 10 ** (int(exponent) + scale)
    digits = _scale(units, scale, count)
    # Half away from zero, in integers.
    quotient, rest = divmod(units * 10**digits, count * 10**scale)
    quotient += 2 * rest >= count * 10**scale
    text = str(quotient).rjust(digits + 1, "0")
    sign = "-" if is_negative and quotient else ""
    return f"{sign}{text[:-digits]}.{text[-digits:]}" if digits else f"{sign}{text}"


def _scale(units: int, scale: int, count: int) -> int:
    """The digits behind the point of a quotient."""
    weight, first = _leading(units, scale)
    of_count, first_of_count = _leading(count, 0)
    weight -= of_count
    if first <= first_of_count:
        weight -= 1
    return min(max(_SIGNIFICANT - weight * _GROUP, scale, 0), 1000)


def _leading(units: int, scale: int) -> tuple[int, int]:
    """The weight of the first digit that is not 0 in base 10000, and that digit; 0 and 0 of zero."""
    if not units:
        return 0, 0
    # As whole digits of base 10000 behind the point.
    behind = -(-scale // _GROUP)
    number, weight = units * 10 ** (behind * _GROUP - scale), -behind
    while number >= 10**_GROUP:
        number //= 10**_GROUP
        weight += 1
    return weight, number
