"""Small plots as SVG text: lines, steps and bars with whiskers. For reports that must be one file and need no other package.

Knows: axes, ticks and strokes. Refuses to know: what the numbers mean.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

INK, SOFT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = ("#2f6fb0", "#d9822b", "#3a8f5c", "#8f4aa8")
WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 42
MOST_POINTS = 600
"""A line of more is thinned."""

Points = Sequence[tuple[float, float]]


def ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Round numbers from low to high, about so many."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, about)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if raw <= size * factor)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A tick's text."""
    return f"{value:.6g}"


def line_plot(
    lines: Sequence[tuple[str, Points]], *, title: str, x: str, y: str, steps: bool = False, high: float | None = None
) -> str:
    """Named lines in one frame, from 0 on both axes. `steps`: a value holds until the next one. `high`: the top of the y axis."""
    points = [point for _, line in lines for point in line if all(map(math.isfinite, point))]
    x_high = max((point[0] for point in points), default=1.0) or 1.0
    y_high = high or max((point[1] for point in points), default=1.0) * 1.06 or 1.0
    frame = _Frame(x_high, y_high)
    parts = frame.axes(title, x, y, ticks(0, x_high), ticks(0, y_high, about=4))
    for place, (name, line) in enumerate(lines):
        colour = COLOURS[place % len(COLOURS)]
        parts.append(frame.path(line, colour, steps=steps, dashed=place > 0))
        at = LEFT + 8 + 150 * place
        parts.append(f'<line x1="{at}" y1="26" x2="{at + 18}" y2="26" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(at + 23, 30, name, size=11))
    return _whole(parts, title)


def share_plot(rows: Sequence[tuple[str, float, float, float]], *, title: str) -> str:
    """Shares from 0 to 1 with their intervals: (name, share, low, high), one bar each."""
    height = TOP + 26 * len(rows) + 30
    wide = WIDTH - 170 - RIGHT - 40
    parts = [_text(8, 18, title, size=13, bold=True)]
    for share in (0, 0.25, 0.5, 0.75, 1):
        at = 170 + wide * share
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{height - 26}" stroke="{GRID}"/>')
        parts.append(_text(at, height - 10, f"{share:.0%}", anchor="middle", colour=SOFT))
    for place, (name, share, low, high) in enumerate(rows):
        y = TOP + 26 * place + 4
        colour = COLOURS[place % 2]
        parts.append(_text(162, y + 12, name, anchor="end"))
        parts.append(
            f'<rect x="170" y="{y}" width="{max(1.0, wide * share):.1f}" height="16" fill="{colour}" opacity="0.75"/>'
        )
        left, right, middle = 170 + wide * low, 170 + wide * high, y + 8
        parts.append(
            f'<path d="M{left:.1f} {middle - 4}v8M{left:.1f} {middle}H{right:.1f}M{right:.1f} {middle - 4}v8" stroke="{INK}" fill="none"/>'
        )
        parts.append(_text(170 + wide + 8, y + 12, f"{share:.0%}"))
    return _whole(parts, title, height=height)


def cumulative(values: Sequence[float], *, scale: float = 1.0) -> list[tuple[float, float]]:
    """Points of the share (percent) of values that are at most x."""
    ordered = sorted(value * scale for value in values)
    return [(value, 100.0 * (place + 1) / len(ordered)) for place, value in enumerate(ordered)]


class _Frame:
    """Data to pixels."""

    def __init__(self, x_high: float, y_high: float) -> None:
        self._x, self._y = (WIDTH - LEFT - RIGHT) / x_high, (HEIGHT - TOP - BOTTOM) / y_high
        self._y_high = y_high

    def at(self, x: float, y: float) -> tuple[float, float]:
        return LEFT + x * self._x, HEIGHT - BOTTOM - min(y, self._y_high) * self._y

    def axes(self, title: str, x: str, y: str, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[str]:
        parts = [_text(8, 16, title, size=13, bold=True)]
        for value in y_ticks:
            _, at = self.at(0, value)
            parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="{GRID}"/>')
            parts.append(_text(LEFT - 6, at + 4, number(value), anchor="end", colour=SOFT))
        for value in x_ticks:
            at, _ = self.at(value, 0)
            parts.append(_text(at, HEIGHT - BOTTOM + 16, number(value), anchor="middle", colour=SOFT))
        base = HEIGHT - BOTTOM
        parts.append(f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="{SOFT}"/>')
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x, anchor="middle", colour=SOFT))
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle" fill="{SOFT}" font-size="11">'
            f"{html.escape(y)}</text>"
        )
        return parts

    def path(self, line: Points, colour: str, *, steps: bool, dashed: bool) -> str:
        thin = max(1, math.ceil(len(line) / MOST_POINTS))
        kept = [*line[::thin], *line[-1:]] if thin > 1 else list(line)
        words: list[str] = []
        before = 0.0
        for place, (x, y) in enumerate(kept):
            at_x, at_y = self.at(x, y)
            if place == 0:
                words.append(f"M{at_x:.1f} {at_y:.1f}")
            elif steps:
                words.append(f"L{at_x:.1f} {before:.1f}L{at_x:.1f} {at_y:.1f}")
            else:
                words.append(f"L{at_x:.1f} {at_y:.1f}")
            before = at_y
        dash = ' stroke-dasharray="6 3"' if dashed else ""
        return f'<path d="{"".join(words)}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", colour: str = INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"{weight}>{html.escape(text)}</text>'


def _whole(parts: Sequence[str], title: str, *, height: float = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{html.escape(title, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="system-ui,sans-serif">{"".join(parts)}</svg>'
    )
