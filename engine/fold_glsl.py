"""The kernel of a fold as GLSL: one subgroup a row, columns in groups of four (shaders/rows.glsl)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from .expr import Expr, fma, variable
from .expr_glsl import glsl_includes, glsl_statements
from .expr_simplify import simplify
from .expr_walk import named
from .fold import FoldSpec, State, Walk
from .kernel import read_shader

_START = """
void main() {
    const uint row = subgroup_row();
    if (row >= args.rows) return;
    const uint cols = args.cols, start = row * cols;
    const uint first = 4 * gl_SubgroupInvocationID, stride = 4 * gl_SubgroupSize;
"""


def fold_arguments(spec: FoldSpec) -> str:
    """The kernel's arguments: inputs, then outputs that are none of them, step, rows, cols, scalars."""
    parts = []
    for name, kind in spec.inputs.items():
        if kind != "step":
            access = "inout" if name in spec.elements else "in"
            parts.append(f"{access} {'i32' if kind == 'whole' else 'f32' if kind == 'value' else 'row'} p_{name}")
    parts += [f"out row p_{name}" for name in spec.elements if name not in spec.inputs]
    parts += [f"out f32 p_{name}" for name in spec.values]
    parts += (
        ["step"] * bool(spec.of_kind("step"))
        + ["uint rows, uint cols"]
        + [f"{kind} p_{name}" for name, kind in spec.scalar_kinds.items()]
    )
    return ", ".join(parts)


def fold_glsl(spec: FoldSpec, rounds: int = 0) -> str:
    """The kernel's text. In it the fold's own names have a letter before them (p_ an argument, v_ a value, s_ a state
    of one lane, k_ elements kept), so that none can be a word of GLSL.

    rounds: 0 for rows of any length, or how often a subgroup goes on along a row: rows of that many rounds, the last
    of which may be partly empty. Their loops are written out, and what more than one loop reads is loaded once.
    """
    roots = [*spec.elements.values(), *spec.values.values()]
    for walk in spec.walks:
        roots += [*walk.results.values(), *(root for state in walk.states for root in _parts(state))]
    includes = glsl_includes(roots)
    if "expr.glsl" not in includes and "exp.glsl" not in includes:
        includes = ("exp.glsl", *includes)
    text = "".join(read_shader(name) for name in ("rows.glsl", *includes))
    writer = _Writer(spec, rounds)
    return text + _START + writer.rows() + "".join(map(writer.walk, spec.walks)) + writer.outputs() + "}\n"


def _parts(state: State) -> list[Expr]:
    return [state.contribution] if state.aligned is None else [state.contribution, state.aligned]


_ROUND = "@"  # in the text of a round, for its number


class _Writer:
    def __init__(self, spec: FoldSpec, rounds: int) -> None:
        self.spec = spec
        self.rounds = rounds
        self.kept = kept_inputs(spec) if rounds else ()
        self.of_row = {name: f"v_{name}" for name in (*spec.of_kind("value", "whole"), *spec.picks)}
        self.of_row |= {name: f"args.step.{name}" for name in spec.of_kind("step")}
        for name, kind in spec.scalar_kinds.items():
            self.of_row[name] = f"uint(args.p_{name})" if kind == "int" else f"args.p_{name}"
        self.of_row |= {"cols": "float(cols)", "num_cols": "cols"}
        self.wholes = spec.wholes

    def rows(self) -> str:
        """What is known of a row before it is walked over."""
        lines = []
        for name in self.spec.of_kind("value"):
            lines.append(f"const float v_{name} = args.p_{name}.v[row];")
        for name in self.spec.of_kind("whole"):
            lines.append(f"const uint v_{name} = uint(args.p_{name}.v[row]);")
        for name, (source, index) in self.spec.picks.items():
            place = self.of_row[index.name] if index.name else f"{int(index.number)}u"
            lines.append(f"const float v_{name} = load1(args.p_{source}, start + min({place}, cols - 1u));")
        if self.spec.skip is not None:
            lines += self._float("bool", "skipped", self.spec.skip, {})
            lines += ["if (skipped) {", *self._zeros(), "    return;", "}"]
        for r in range(self.rounds):
            at = f"first + {r}u * stride"
            for name in self.kept:
                lines.append(f"const vec4 k_{name}_{r} = {self._load(name, at, r)};")
        return indented(lines)

    def _loop(self, body: Callable[[int], list[str]]) -> list[str]:
        """A loop over the row, of what `body` gives for a round: -1 in a loop that is not written out."""
        if not self.rounds:
            lines = [f"    {line}" for line in body(-1)]
            return [
                "for (uint base = 0; base < cols; base += stride) {",
                "    const uint c = base + first;",
                *lines,
                "}",
            ]
        last = self.rounds - 1
        whole, rest = body(0) if last else [], body(last)  # printing costs milliseconds: once for all whole rounds
        lines = []
        for r in range(self.rounds):
            text = (line.replace(_ROUND, str(r)) for line in (rest if r == last else whole))
            lines += ["{", f"    const uint c = first + {r}u * stride;", *(f"    {line}" for line in text), "}"]
        return lines

    def _is_whole(self, r: int) -> bool:
        """Whether all columns of a round are there."""
        return 0 <= r < self.rounds - 1

    def _load(self, name: str, at: str, r: int) -> str:
        start = "start" if self.spec.inputs[name] == "row" else "0u"
        if self._is_whole(r):
            return f"load4_inside(args.p_{name}, {start}, {at})"
        return f"load4(args.p_{name}, {start}, {at}, cols)"

    def walk(self, walk: Walk) -> str:
        """One loop over the row, the merging of the lanes' states, and the results."""
        lines = self._states(walk) if walk.states else []
        for name, result in walk.results.items():
            lines += self._float("float", f"v_{name}", result, {})
            self.of_row[name] = f"v_{name}"
        return indented(lines)

    def _states(self, walk: Walk) -> list[str]:
        plain = [state for state in walk.states if state.merge == "sum" and state.aligned is None]
        lines = [
            f"vec4 s_{s.name} = vec4(0.0);" if s in plain
            else f"float s_{s.name} = {'0.0' if s.merge == 'sum' else 'NEGATIVE_INFINITY'};"
            for s in walk.states
        ]  # fmt: skip
        lines += [f"bool nan_{s.name} = false;" for s in walk.states if s.merge == "max"]
        new: dict[str, str] = {}
        for state in walk.states:
            if state.merge == "max":
                new |= {state.name: f"v_{state.name}", f"old_{state.name}": f"s_{state.name}"}
        lines += self._loop(lambda r: self._round(walk, plain, r))
        for state in walk.states:
            if state in plain:
                lines.append(f"const float v_{state.name} = subgroupAdd(sum4(s_{state.name}));")
            elif state.merge == "max":
                lines.append(f"const float v_{state.name} = max_or_nan(s_{state.name}, nan_{state.name});")
            else:
                assert state.aligned is not None
                lines += self._float("float", f"a_{state.name}", state.aligned, {**new, state.name: f"s_{state.name}"})
                lines.append(f"const float v_{state.name} = subgroupAdd(a_{state.name});")
            self.of_row[state.name] = f"v_{state.name}"
        return lines

    def _round(self, walk: Walk, plain: Sequence[State], r: int) -> list[str]:
        """What a round brings to a walk's states."""
        body = self._loads((state.contribution for state in walk.states), r)
        new: dict[str, str] = {}
        for state in walk.states:
            if state in plain:
                continue
            neutral = "0.0" if state.merge == "sum" else "NEGATIVE_INFINITY"
            body += self._vector({f"c_{state.name}": state.contribution}, new)
            if not self._is_whole(r):
                body.append(f"c_{state.name} = inside4(c_{state.name}, vec4({neutral}), c, cols);")
            if state.merge == "max":
                block = f"max(max(c_{state.name}.x, c_{state.name}.y), max(c_{state.name}.z, c_{state.name}.w))"
                body.append(f"const float v_{state.name} = max(s_{state.name}, {block});")
                body.append(f"nan_{state.name} = nan_{state.name} || any(isnan(c_{state.name}));")
                new |= {state.name: f"v_{state.name}", f"old_{state.name}": f"s_{state.name}"}
            else:
                body.append(f"const float b_{state.name} = sum4(c_{state.name});")
                names = {**new, state.name: f"s_{state.name}", "_block": f"b_{state.name}"}
                body += self._float("", f"s_{state.name}", plus(state.aligned, variable("_block")), names)
        body += [f"s_{state.name} = v_{state.name};" for state in walk.states if state.merge == "max"]
        sums = {f"n_{s.name}": plus(s.contribution, variable(f"_{s.name}")) for s in plain}
        body += self._vector(sums, {f"_{s.name}": f"s_{s.name}" for s in plain}, ready=True)
        if self._is_whole(r):
            return body + [f"s_{s.name} = n_{s.name};" for s in plain]
        return body + [f"s_{s.name} = inside4(n_{s.name}, s_{s.name}, c, cols);" for s in plain]

    def outputs(self) -> str:
        """What is written of a row."""
        lines = []
        for name, root in self.spec.values.items():
            lines += self._float("float", f"o_{name}", root, {})
        if self.spec.values:
            lines += ["if (subgroupElect()) {"]
            lines += [*(f"    args.p_{name}.v[row] = o_{name};" for name in self.spec.values), "}"]
        if self.spec.elements:
            lines += self._loop(self._stores)
        return indented(lines)

    def _stores(self, r: int) -> list[str]:
        """The elements of a round."""
        elements = self.spec.elements
        body = self._loads(elements.values(), r)
        body += self._vector({f"o_{name}": root for name, root in elements.items()}, {})
        if self._is_whole(r):
            return body + [f"store4_inside(args.p_{name}, start, c, o_{name});" for name in elements]
        body += [f"store4(args.p_{name}, start, c, cols, o_{name});" for name in elements]
        return ["if (c >= cols) continue;", *body] if r < 0 else ["if (c < cols) {", *body, "}"]

    def _zeros(self) -> list[str]:
        lines = []
        if self.spec.values:
            lines = ["    if (subgroupElect()) {"]
            lines += [*(f"        args.p_{name}.v[row] = 0.0;" for name in self.spec.values), "    }"]
        if self.spec.elements:
            lines.append("    for (uint base = 0; base < cols; base += stride) {")
            for name in self.spec.elements:
                lines.append(f"        store4(args.p_{name}, start, base + first, cols, vec4(0.0));")
            lines.append("    }")
        return lines

    def _loads(self, roots: Iterable[Expr], r: int) -> list[str]:
        used = set(named(roots))
        return [
            f"const vec4 v_{name} = {f'k_{name}_{_ROUND}' if name in self.kept else self._load(name, 'c', r)};"
            for name in self.spec.of_kind("row", "column")
            if name in used
        ]

    def _vector(self, outputs: Mapping[str, Expr], new: Mapping[str, str], ready: bool = False) -> list[str]:
        """Statements that declare and assign vec4s. new: more names; they are vectors already when `ready`."""
        if not outputs:
            return []
        names = {
            name: text if name in self.wholes else f"vec4({text})"
            for name, text in {**self.of_row, **({} if ready else new)}.items()
        }
        names |= {name: f"v_{name}" for name in self.spec.of_kind("row", "column")} | (dict(new) if ready else {})
        names["column"] = "uvec4(c, c + 1u, c + 2u, c + 3u)"
        text = glsl_statements({name: simplify(root) for name, root in outputs.items()}, "vec4", names)
        return [f"vec4 {name};" for name in outputs] + scoped(text)

    def _float(self, kind: str, name: str, root: Expr, new: Mapping[str, str]) -> list[str]:
        """Statements that assign one number, declared first when a type is given."""
        text = glsl_statements({name: simplify(root)}, "float", {**self.of_row, **new})
        return [f"{kind} {name};"] * bool(kind) + scoped(text)


def kept_inputs(spec: FoldSpec) -> tuple[str, ...]:
    """The row inputs that more than one loop reads."""
    loops = [[part for state in walk.states for part in _parts(state)] for walk in spec.walks if walk.states]
    loops += [list(spec.elements.values())] if spec.elements else []
    reads = [set(named(roots)) for roots in loops]
    return tuple(name for name in spec.of_kind("row") if sum(name in read for read in reads) > 1)


def plus(contribution: Expr | None, so_far: Expr) -> Expr:
    """A sum with its next summand; a product goes into it by fma."""
    assert contribution is not None
    if contribution.op == "mul":
        a, b = contribution.args
        return fma(a, b, so_far)
    return so_far + contribution


def scoped(text: str) -> list[str]:
    """Statements in a scope of their own, for the sake of their temporaries."""
    lines = text.splitlines()
    return lines if len(lines) == 1 else ["{", *(f"    {line}" for line in lines), "}"]


def indented(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
