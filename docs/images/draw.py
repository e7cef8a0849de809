#!/usr/bin/env python3
"""The drawings of docs/how-it-works.md, computed from degrees: `python docs/images/draw.py` writes step.svg, turn.svg,
levels.svg and state.svg beside itself. `drawings()` gives them as text.

Owners follow docs/design.md, section 1 (Who owns which bytes); tests/python/docs_pages_test.py compares them with the
layouts of the library, and the committed files with what this script writes.
"""

from __future__ import annotations

from pathlib import Path

COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#7a7a33"]
TEXT, FAINT, LINE = "#222222", "#5a5a5a", "#9a9a9a"
GATHER, COMPUTE, REDUCE, UPDATE = "#4c78a8", "#54a24b", "#f58518", "#b279a2"


# ---- who owns what ----
def parts(rank: int, p: int, g: int, o: int) -> tuple[int, int, int]:
    """Which piece of the parameters (of P), of the gradients (of G) and which chunk (of O) a rank has."""
    parameters = rank % p
    gradients = parameters * (g // p) + rank % g // p
    return parameters, gradients, gradients * (o // g) + rank % o // g


def bytes_of(p: int, g: int, o: int, keeps: bool, compute: int = 2) -> dict[str, float]:
    """Bytes of a rank for each parameter of the model: bf16 beside fp32 masters, AdamW, accumulation in two hops.
    `keeps`: forward does not free what it gathered."""
    gathered = compute if keeps and p > 1 else 0
    return {
        "parameters to compute with": 0 if p == o and not keeps else compute if p == 1 else compute / p * (p != o),
        "gathered, from forward to backward": gathered,
        "accumulated gradients": compute / g,
        "masters and gradients of the update": 8 / o,
        "AdamW's moments": 8 / o,
    }


# ---- shapes ----
class Drawing:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            f' font-family="sans-serif" font-size="15">\n<title>{title}</title>\n'
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        )
        self.shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, **more: str) -> None:
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{attributes}/>'
        )

    def text(self, x: float, y: float, words: str, fill: str = TEXT, anchor: str = "start", **more: str) -> None:
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}"{attributes}>{words}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = LINE, **more: str) -> None:
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self.shapes.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{colour}" fill="none"{attributes}/>')

    def named_box(self, x: float, y: float, width: float, height: float, fill: str, name: str, **more: str) -> None:
        self.box(x, y, width, height, fill, rx="3", **more)
        self.text(x + width / 2, y + height / 2 + 5, name, "#ffffff", "middle", font_weight="bold", font_size="15")

    def svg(self) -> str:
        return self.head + "\n".join(self.shapes) + "\n</svg>\n"


# ---- one step ----
def step_drawing() -> Drawing:
    """Three lanes of one rank: what is gathered ahead, what computes, what is reduced behind."""
    drawing = Drawing(960, 330, "One step of one rank: gathers run ahead of what computes, reductions behind it")
    units = ["1", "2", "3"]
    forward, backward, gather, reduce, scale = 2.0, 4.0, 1.6, 2.2, 26.5
    left, top, height, gap = 164, 62, 38, 56
    for row, (name, colour) in enumerate([("gather", GATHER), ("compute", COMPUTE), ("reduce", REDUCE)]):
        y = top + row * gap
        drawing.text(12, y + 17, name, colour, font_weight="bold", font_size="16")
        drawing.text(12, y + 35, ["over P ranks", "this rank's batch", "over G, O, replicas"][row], FAINT)
        drawing.box(left, y, 960 - left - 12, height, "#f2f2f2")

    def put(row: int, begin: float, length: float, colour: str, name: str) -> None:
        drawing.named_box(left + begin * scale, top + row * gap + 2, length * scale - 2, height - 4, colour, name)

    lane = compute = behind = 0.0  # when each is free
    begun: list[float] = []
    # A lane gathers at most two units ahead of the one that computes (sharding.limit_all_gathers).
    order = [(unit, forward, "F") for unit in units] + [(unit, backward, "B") for unit in reversed(units)]
    kept = ""
    for place, (unit, length, kind) in enumerate(order):
        if unit != kept:
            start = max(lane, begun[place - 2] if place >= 2 else 0.0)
            put(0, start, gather, GATHER, unit)
            lane = start + gather
            compute = max(compute, lane)
        put(1, compute, length, COMPUTE, f"{kind}{unit}")
        begun.append(compute)
        compute += length
        kept = unit
        if kind == "B":
            behind = max(behind, compute)
            put(2, behind, reduce, REDUCE, unit)
            behind += reduce
    put(1, behind, 2.5, UPDATE, "update")
    put(0, behind + 2.5, 2.6, GATHER, "refresh")
    end = left + (behind + 5.1) * scale
    drawing.text(left, 30, "one step, three units, every unit freed after its forward and backward", font_size="16")
    drawing.line(left, 232, end, 232, stroke_width="1.5")
    drawing.text(end + 6, 237, "time", FAINT)
    facts = [
        (GATHER, "gather: all-gather of a unit's parameters over the P ranks that have its pieces"),
        (REDUCE, "reduce: reduce-scatter over G, then over O/G; all-reduce over the N/O replicas"),
        (UPDATE, "update: each rank its 1/O of the masters; refresh: all-gather over O/P, where P is less than O"),
    ]
    for i, (colour, words) in enumerate(facts):
        drawing.box(left, 253 + 24 * i, 13, 13, colour)
        drawing.text(left + 22, 264.5 + 24 * i, words)
    return drawing


# ---- a turn of the dial ----
def turn_drawing() -> Drawing:
    """Degree 4 to degree 2 of four ranks: every rank is sent only the quarters that it lacks."""
    ranks, before, after = 4, 4, 2
    drawing = Drawing(960, 344, "The dial turned from degree 4 to degree 2 on four ranks: who sends what")
    width, height, left, right = 300, 40, 84, 566
    quarter = width / before
    owner = {parts(rank, before, before, before)[2]: rank for rank in range(ranks)}
    drawing.text(left, 30, "degree 4: each rank owns a quarter", font_size="16")
    drawing.text(right, 30, "degree 2: each rank owns a half, twice over", font_size="16")
    arrows, boxes = Drawing(0, 0, ""), Drawing(0, 0, "")
    for rank in range(ranks):
        y = 48 + rank * 62
        drawing.text(12, y + 25, f"rank {rank}", font_weight="bold")
        own = parts(rank, before, before, before)[2]
        half = parts(rank, after, after, after)[2]
        for piece in range(before):
            for x, has in ((left, piece == own), (right, piece * after // before == half)):
                place = x + piece * quarter
                if not has:
                    boxes.box(place + 1, y + 1, quarter - 2, height - 2, "#f2f2f2")
                elif x == left or piece == own:
                    boxes.named_box(place + 1, y + 1, quarter - 2, height - 2, COLOURS[piece], "has")
                else:
                    boxes.box(place + 2, y + 2, quarter - 4, height - 4, "#ffffff", stroke=COLOURS[piece],
                              stroke_width="3", rx="3")  # fmt: skip
                    sender = owner[piece]
                    boxes.text(place + quarter / 2, y + 25, f"from {sender}", TEXT, "middle", font_size="15")
                    arrows.line(left + width + 6, 48 + sender * 62 + height / 2, right - 8, y + height / 2,
                                COLOURS[piece], stroke_width="2.5", stroke_opacity="0.8")  # fmt: skip
    drawing.shapes += arrows.shapes + boxes.shapes
    drawing.text(left, 312, "A bar is the whole training state: masters, moments and gradients, unit by unit.")
    drawing.text(left, 332, "Filled quarters stay where they are; the others are copies of one rank's bytes.")
    return drawing


# ---- two hosts ----
def levels_drawing() -> Drawing:
    """Eight ranks on two hosts under three layouts: which part of each state a rank has."""
    drawing = Drawing(960, 580, "Who shards with whom on two hosts of four ranks, under three layouts")
    hosts, each, size = 2, 4, 46
    panels = [
        ("8 | 8 | 8", "FULL_SHARD", (8, 8, 8), "gathers and reductions cross the network", "least memory"),
        ("4 | 4 | 4", "HYBRID_SHARD, degree 4", (4, 4, 4), "one all-reduce of 1/4 of the gradients crosses it",
         "the state is there twice"),
        ("4 | 8 | 8", "ZERO_PP, degree 4", (4, 8, 8), "reductions and the refresh cross it, gathers do not",
         "1/4 of parameters more"),
    ]  # fmt: skip
    for host in range(hosts):
        x = 236 + host * 362
        drawing.box(x - 10, 38, 352, 530, "none", stroke=LINE, rx="8", stroke_dasharray="6 4")
        drawing.text(x + 166, 26, f"host {host}: shared memory inside", TEXT, "middle", font_size="15")
        for local in range(each):
            drawing.text(x + 82 + local * 68, 62, f"rank {host * each + local}", FAINT, "middle", font_size="15")
    for i, (degrees, name, (p, g, o), crosses, costs) in enumerate(panels):
        y = 72 + i * 168
        drawing.text(12, y + 22, degrees, font_size="18", font_weight="bold")
        drawing.text(12, y + 44, name)
        for row, words in enumerate(_wrapped(crosses, 26) + [costs]):
            drawing.text(12, y + 68 + 19 * row, words, FAINT, font_size="15")
        for row, (state, degree) in enumerate([("P", p), ("G", g), ("O", o)]):
            for rank in range(hosts * each):
                host, local = divmod(rank, each)
                x = 236 + host * 362
                piece = parts(rank, p, g, o)[row]
                if local == 0:
                    drawing.text(x + 8, y + 30 + row * 50, state, font_weight="bold", font_size="16")
                colour = COLOURS[piece * len(COLOURS) // degree]
                drawing.named_box(
                    x + 82 + local * 68 - 29, y + 4 + row * 50, 58, size - 4, colour, f"{piece + 1}/{degree}"
                )
    return drawing


def _wrapped(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


# ---- memory ----
STRATEGIES = [
    ("NO_SHARD (DDP)", 1, 1, 1, True),
    ("ZERO_1", 1, 1, 8, True),
    ("ZERO_2", 1, 8, 8, True),
    ("SHARD_GRAD_OP", 8, 8, 8, True),
    ("HYBRID_SHARD, 4", 4, 4, 4, False),
    ("ZERO_PP, 4", 4, 8, 8, False),
    ("FULL_SHARD (ZeRO-3)", 8, 8, 8, False),
]


def state_drawing() -> Drawing:
    drawing = Drawing(960, 452, "Bytes of training state of a rank for each parameter of the model, by strategy")
    colours = [COLOURS[0], COLOURS[5], COLOURS[1], COLOURS[2], COLOURS[3]]
    left, scale = 196, 36.0
    drawing.text(
        12, 30, "bytes a rank holds for each parameter: 8 ranks, bf16 with fp32 masters, AdamW", font_size="16"
    )
    for i, (name, p, g, o, keeps) in enumerate(STRATEGIES):
        y, x = 48 + i * 40, float(left)
        drawing.text(12, y + 20, name)
        held = bytes_of(p, g, o, keeps)
        for colour, amount in zip(colours, held.values()):
            if amount:
                drawing.box(x, y, amount * scale, 28, colour)
                x += amount * scale
        drawing.text(x + 8, y + 20, f"{sum(held.values()):.4g}", font_weight="bold")
    for i, (colour, words) in enumerate(zip(colours, bytes_of(1, 1, 1, True))):
        drawing.box(left, 338 + 22 * i, 13, 13, colour)
        drawing.text(left + 22, 349.5 + 22 * i, words)
    return drawing


def drawings() -> dict[str, str]:
    return {
        "step.svg": step_drawing().svg(),
        "turn.svg": turn_drawing().svg(),
        "levels.svg": levels_drawing().svg(),
        "state.svg": state_drawing().svg(),
    }


def main() -> None:
    for name, text in drawings().items():
        (Path(__file__).parent / name).write_text(text)


if __name__ == "__main__":
    main()
