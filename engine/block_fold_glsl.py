"""The kernel of a block fold as GLSL: register tiles, loads that a subgroup shares, products, and states between."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from .block_fold import BlockFold
from .expr import Expr, constant, variable
from .expr_glsl import glsl_includes, glsl_statements
from .expr_simplify import simplify
from .expr_walk import named, substitute
from .fold_glsl import plus, scoped
from .kernel import Kernel, read_shader
from .register_loops import Braces, Lines, as_loops, loop, written_out

LOOPS = ("unrolled", "rolled", "written")  # by the driver; not at all: registers lie in memory; in the text
OPTIONAL_SHIFT = 28  # of `flags`: bits that say which optional numbers are given


class Tile(NamedTuple):
    """How a kernel cuts its work. No choice but `spread`, which the device gives, changes a bit of the results.

    spread: lanes that share the loads of a block. rows: held rows a lane. loops: one of LOOPS. width: elements a
    load, 1 or 2.
    """

    spread: int
    rows: int
    loops: str
    width: int = 1

    def chunk(self, head_dim: int) -> int:
        """Dimensions that the lanes load together."""
        return self.spread // block_rows(head_dim, self.spread) * self.width

    @property
    def name(self) -> str:
        """What it adds to a kernel's name."""
        return f"r{self.rows}{'' if self.loops == LOOPS[0] else '_' + self.loops}"


def block_rows(head_dim: int, spread: int) -> int:
    """Streamed rows in one block: part of the accumulation order, so a function of head_dim and device.

    Few, so that products and weights of a block stay in registers beside the tile: two took 0.6 of the time of four
    at head_dim 64 on lavapipe 22.3.
    """
    return min(spread, 4 if head_dim <= 16 else 2)


def block_fold_kernel(
    fold: BlockFold, head_dim: int, tile: Tile, *, continues: bool = False, suffix: str = ""
) -> Kernel:
    """The kernel of a fold for one tile. continues: sums go on from what their outputs hold (`shared` "held")."""
    name = f"{fold.name}{'_more' * continues}_{head_dim}_{tile.name}{suffix}"
    defines: dict[str, int | float | str] = {
        "HEAD_DIM": head_dim,
        "SPREAD": tile.spread,
        "BLOCK": block_rows(head_dim, tile.spread),
        "WIDTH": tile.width,
        "ROWS": tile.rows,
        "ROLLED": int(tile.loops != "unrolled"),
        "WRITTEN": int(tile.loops == "written"),
        **({} if fold.seen is None else fold.seen.defines),
        **({"WORDS64": 1} if tile.width == 2 else {}),
    }
    text = block_fold_glsl(fold, continues, (head_dim, tile) if tile.loops == "written" else None)
    return Kernel(name, text, block_fold_arguments(fold), subgroups=1, defines=defines)


def strides_of(fold: BlockFold) -> list[str]:
    """Names of the arguments that say how far rows lie apart, in order."""
    return list(dict.fromkeys(fold.stride_of(name) for name in (*fold.held, *fold.streamed, *fold.rows)))


def block_fold_arguments(fold: BlockFold) -> str:
    """The kernel's arguments: inputs, outputs, sizes, strides, flags, scalars, and which members of a group to fold."""
    whole = () if fold.seen is None else fold.seen.tensors
    parts = [f"in {'i32' if name in whole else 'f32'} p_{name}" for name in fold.tensor_inputs]
    parts += [f"{'inout' if fold.shared == 'held' else 'out'} f32 p_{name}" for name in fold.rows]
    parts += [f"out f32 p_{name}" for name in fold.values]
    parts += ["uint num_held, uint num_streamed, uint heads", *(f"uint {name}" for name in strides_of(fold))]
    parts += ["uint flags", *(f"float p_{name}" for name in fold.scalars)]
    return ", ".join(parts + ["uint members"] * (fold.shared == "held"))


@lru_cache(maxsize=256)
def block_fold_glsl(fold: BlockFold, continues: bool = False, written: tuple[int, Tile] | None = None) -> str:
    """The kernel's text. In it the fold's own names have a letter before them, so that none can be a word of GLSL: p_
    an argument, h_ a held row, n_ a number, x_ a product, s_ a state, a_ a sum of rows, v_ a result.

    Raises ValueError when it shall continue and what it writes are not its sums alone.
    """
    writer = _Writer(fold, continues)
    includes = glsl_includes(writer.roots())
    if "expr.glsl" not in includes and "exp.glsl" not in includes:
        includes = ("exp.glsl", *includes)
    mask = "see_all.glsl" if fold.seen is None else fold.seen.shader
    text = "".join(read_shader(name) for name in (*includes, "block_fold.glsl", mask))
    if written is None:
        return text + "\nvoid main() {\n" + as_loops(writer.main(), "    ") + "}\n"
    head_dim, tile = written
    block, chunk = block_rows(head_dim, tile.spread), tile.chunk(head_dim)
    sizes = {"ROWS": tile.rows, "BLOCK": block, "HEAD_DIM": head_dim, "CHUNK": chunk, "CHUNKS": -(-head_dim // chunk)}
    return text + "\nvoid main() {\n" + written_out(writer.main(), sizes) + "}\n"


class _Writer:
    def __init__(self, fold: BlockFold, continues: bool) -> None:
        self.fold, self.continues = fold, continues
        states, sums = fold.walk.states, fold.sums
        if continues and not fold.can_continue:
            raise ValueError(
                f"block fold {fold.name!r} has more than sums that are written as they are: it cannot go on"
            )
        self.maxima = [state for state in states if state.merge == "max"]
        self.totals = [state for state in states if state.merge == "sum"]
        # The weights of pairs, each worked out once. What a maximum is of is -inf where nothing is seen.
        self.tops = [f"_top{i}" for i in range(len(self.maxima))]
        parts = [state.contribution for state in self.totals] + [one.weight for one in sums]
        self.weights = {root: f"w{i}" for i, root in enumerate(dict.fromkeys(parts))}
        self.factors = {one.factor: "" for one in sums if one.factor is not None}
        self.factors = {root: f"_f{i}" for i, root in enumerate(self.factors)}
        in_products = {name for pair in fold.products.values() for name in pair}
        self.held = [name for name in fold.held if name in in_products]
        self.multiplied = [name for name in fold.streamed if name in in_products]
        self.summed = list(dict.fromkeys(one.of for one in sums))
        self.kept = [name for name in self.multiplied if name in self.summed]  # loaded once for both products
        self.many = {"held": "MANY_HEADS", "streamed": "FEW_HEADS"}
        if fold.shared == "held":
            self.many = {"held": "FEW_HEADS", "streamed": "MANY_HEADS"}
        self.names = self._names()
        self.unseen_of_row = self.unseen_of_pair = None
        if fold.unseen is not None:
            if set(named([fold.unseen])) <= fold.known_of_row:
                self.unseen_of_row = fold.unseen
            else:
                self.unseen_of_pair = fold.unseen

    def _names(self) -> dict[str, str]:
        """GLSL of what expressions may have in them, by name."""
        fold = self.fold
        places = {
            "held": "float(HELD_ROW(r))",
            "held_end": "float(HELD_OFFSET + int(HELD_ROW(r)))",
            "streamed": "float(block + int(j))",
            "streamed_end": "float(block + int(j) - HELD_OFFSET)",
        }
        index = {"held": "[r]", "streamed": "[j]", "head": ""}
        names = {name: f"args.p_{name}" for name in fold.scalars}
        names |= {name: f"n_{name}{index[kind]}" for name, kind in fold.numbers.items()}
        names |= {name: f"n_{name}[r]" for name in fold.dots}
        names |= {name: f"x_{name}[i]" for name in fold.products}
        names |= {name: f"{name}[i]" for name in self.tops}
        names |= {name: f"{name}[r]" for name in self.factors.values()}
        return names | {name: places[kind] for name, kind in fold.positions.items()}

    def roots(self) -> list[Expr]:
        """Every expression there is."""
        fold = self.fold
        found = [*fold.rows.values(), *fold.values.values(), *fold.start.values(), *fold.walk.results.values()]
        found += [*self.weights, *self.factors, *(state.contribution for state in self.maxima)]
        found += [state.aligned for state in self.totals if state.aligned is not None]
        return found + ([] if fold.unseen is None else [fold.unseen])

    def main(self) -> Lines:
        """All of it."""
        lines = [
            "const uint lane = gl_SubgroupInvocationID;",
            "const uint tile_rows = gl_SubgroupSize * ROWS;",
            "const uint tiles = (args.num_held + tile_rows - 1u) / tile_rows;",
            "const uint tile = balanced_tile(group_index() % tiles, tiles);",
            f"const uint batch = group_index() / tiles / {self.many['held']};",
            f"const uint held_head = group_index() / tiles % {self.many['held']};",
            "const int limit = seen_limit(batch);",
        ]
        if self.fold.shared == "streamed":
            lines += ["const uint streamed_head = held_head / GROUP;", *self._head_numbers("held_head")]
            return lines + self._begin() + self._walk() + self._finish()
        members = "for (uint member = 0; member < args.members >> 16; member++)"
        member = "const uint streamed_head = held_head * GROUP + (args.members & 0xFFFFu) + member;"
        return [
            *lines,
            *self._begin(),
            Braces([member, *self._head_numbers("streamed_head"), *self._walk()], head=members),
            *self._finish(),
        ]

    def _assign(self, kind: str, roots: Mapping[str, Expr], more: Mapping[str, str] | None = None) -> list[str]:
        """Statements that assign values, declared first when a type is given."""
        text = glsl_statements(
            {name: simplify(root) for name, root in roots.items()}, "float", {**self.names, **(more or {})}
        )
        return [f"{kind} {', '.join(roots)};"] * bool(kind) + scoped(text)

    def _load(self, kind: str, target: str, name: str, place: str) -> list[str]:
        """Statements that read a number, declared first when a type is given; one may be left out at a call."""
        source = f"args.p_{name}.v[{place}]"
        if name not in self.fold.absent:
            return [f"{kind} {target} = {source};".lstrip()]
        bit = OPTIONAL_SHIFT + list(self.fold.absent).index(name)
        absent = self._assign(kind, {target: constant(self.fold.absent[name])})
        return [*absent, f"if ((args.flags >> {bit} & 1u) != 0u) {target} = {source};"]

    def _head_numbers(self, head: str) -> list[str]:
        return [line for name in self.fold.of_kind("head") for line in self._load("float", f"n_{name}", name, head)]

    def _row_begins(self, names: Iterable[str], side: str, row: str, more: str = "") -> list[str]:
        """Where rows begin in memory."""
        place = f"(batch * args.num_{side} + {row}) * args.{{}} + {side}_head * HEAD_DIM{more}"
        return [f"const uint at_{name} = {place.format(self.fold.stride_of(name))};" for name in names]

    def _value_place(self, side: str, row: str) -> str:
        return f"(batch * {self.many[side]} + {side}_head) * args.num_{side} + {row}"

    def _held_element(self, name: str) -> str:
        """Dimension d of a held row: in a register, or in memory when no product needs it."""
        return f"h_{name}[r * HEAD_DIM + d]" if name in self.held else f"args.p_{name}.v[at_{name} + d]"

    def _begin(self) -> Lines:
        """What a lane holds before the first block, and which blocks there are."""
        fold = self.fold
        registers = [f"h_{name}[ROWS * HEAD_DIM]" for name in self.held]
        registers += [f"a_{one.name}[ROWS * HEAD_DIM]" for one in fold.sums]
        registers += [f"s_{state.name}[ROWS]" for state in fold.walk.states]
        registers += [f"n_{name}[ROWS]" for name in (*fold.of_kind("held"), *fold.dots)]
        body: Lines = [
            "const uint real = min(HELD_ROW(r), args.num_held - 1u);",
            "const ivec2 range = seen_of_row(int(HELD_ROW(r)), limit, batch);",
            "low[r] = range.x;",
            "count[r] = max(range.y - range.x, 0);",
        ]
        for name in fold.of_kind("held"):
            body += self._load("", f"n_{name}[r]", name, self._value_place("held", "real"))
        body += [f"n_{name}[r] = 0.0;" for name in fold.dots]
        dotted = {name for pair in fold.dots.values() for name in pair}
        outputs = list(fold.rows) if self.continues else []
        read = [name for name in fold.held if name in self.held or name in dotted]
        body += self._row_begins([*read, *outputs], "held", "real")
        each = [f"h_{name}[r * HEAD_DIM + d] = args.p_{name}.v[at_{name} + d];" for name in self.held]
        for i, one in enumerate(fold.sums):
            begin = f"args.p_{outputs[i]}.v[at_{outputs[i]} + d]" if self.continues else "0.0"
            each.append(f"a_{one.name}[r * HEAD_DIM + d] = {begin};")
        for name, (a, b) in fold.dots.items():
            each.append(f"n_{name}[r] = fma({self._held_element(a)}, {self._held_element(b)}, n_{name}[r]);")
        body += loop("d", "HEAD_DIM", each)
        for state in fold.walk.states:
            neutral = constant(0.0 if state.merge == "sum" else -math.inf)
            body += self._assign("", {f"s_{state.name}[r]": fold.start.get(state.name, neutral)})
        if self.unseen_of_row is not None:
            body += [*self._assign("bool", {"unseen": self.unseen_of_row}), "if (unseen) count[r] = 0;"]
        return [
            *([f"float {', '.join(registers)};"] if registers else []),
            "int low[ROWS], count[ROWS];",
            *loop("r", "ROWS", body),
            "const int first = int(tile * tile_rows), past = min(first + int(tile_rows), int(args.num_held));",
            "const ivec2 visited = seen_of_rows(first, past, limit, batch);",
            "const int begin = visited.x / BLOCK * BLOCK, end = visited.y;",
            "const int my_row = int(lane % BLOCK);",
            "const uint my_dim = lane / BLOCK * WIDTH % CHUNK;",
        ]

    def _walk(self) -> Lines:
        """The loop over blocks: products, what becomes of them, sums of rows."""
        fold = self.fold
        # Rows past the end are read from the last one that is seen: others may never have been written.
        body: Lines = ["const uint mine = uint(min(block + my_row, end - 1));"]
        body += self._row_begins(dict.fromkeys((*self.multiplied, *self.summed)), "streamed", "mine", " + my_dim")
        for name in fold.of_kind("streamed"):
            body += self._load("float", f"my_{name}", name, self._value_place("streamed", "mine"))
        products = [f"x_{name}" for name in fold.products]
        body.append(f"float {', '.join(f'{name}[ROWS * BLOCK]' for name in products)};")
        body += loop("i", "ROWS * BLOCK", [" = ".join([*(f"{x}[i]" for x in products), "0.0;"])])
        body += [f"float c_{name}[CHUNKS * WIDTH];" for name in self.kept]
        multiply = [
            f"x_{name}[r * BLOCK + j] = fma(h_{a}[r * HEAD_DIM + c * CHUNK + u], e_{b}, x_{name}[r * BLOCK + j]);"
            for name, (a, b) in fold.products.items()
        ]
        body += self._over_chunks(self.multiplied, self.multiplied, [], multiply)
        body += self._pairs()
        decay, add = [], []
        for one in fold.sums:
            so_far = f"a_{one.name}[r * HEAD_DIM + c * CHUNK + u]"
            if one.factor is not None:
                decay.append(f"{so_far} *= {self.factors[one.factor]}[r];")
            add.append(f"{so_far} = fma({self.weights[one.weight]}[r * BLOCK + j], e_{one.of}, {so_far});")
        if add:
            body += self._over_chunks([n for n in self.summed if n not in self.kept], self.summed, decay, add)
        return [Braces(body, head="for (int block = begin; block < end; block += BLOCK)")]

    def _over_chunks(self, loaded: list[str], used: list[str], once: list[str], each: list[str]) -> Lines:
        """A loop over the dimensions in chunks that lanes load together, and over the streamed rows of a block.

        loaded: streamed rows to load; used: those of which `each`, statements of all held rows, needs the element e_*.
        once: statements before them.
        """
        lines: Lines = []
        for name in loaded:
            lines += [] if name in self.kept else [f"float c_{name}[WIDTH];"]
            place = "c * WIDTH" if name in self.kept else "0"
            lines.append(f"LOAD(args.p_{name}, IN_CHUNK(at_{name}, c), c_{name}, {place})")
        inner = loop("r", "ROWS", once) if once else []
        spread = [
            f"const float e_{name} = FROM_LANE("
            f"c_{name}[{'c * WIDTH + ' * (name in self.kept)}u % WIDTH], u / WIDTH * BLOCK + j);"
            for name in used
        ]
        inner += loop("j", "BLOCK", [*spread, *loop("r", "ROWS", each)])
        lines += loop("u", "CHUNK", [Braces(inner, guard=("c * CHUNK + u", "HEAD_DIM"))])
        return loop("c", "CHUNKS", lines)

    def _pairs(self) -> Lines:
        """From the products of a block to its weights and to the states with it in them."""
        fold = self.fold
        registers = [f"{name}[ROWS * BLOCK]" for name in (*self.tops, *self.weights.values())]
        registers += [f"{name}[ROWS]" for name in self.factors.values()]
        numbers = fold.of_kind("streamed")
        registers += [f"n_{name}[BLOCK]" for name in numbers]
        lines: Lines = [f"float {', '.join(registers)};"] if registers else []
        if numbers:
            lines += loop("j", "BLOCK", [f"n_{name}[j] = FROM_LANE(my_{name}, j);" for name in numbers])
        seen = ["const uint i = r * BLOCK + j;", "bool seen = uint(block + int(j) - low[r]) < uint(count[r]);"]
        if self.unseen_of_pair is not None:
            seen += [*self._assign("bool", {"unseen": self.unseen_of_pair}), "seen = seen && !unseen;"]
        body: Lines = []
        new: dict[str, str] = {}
        if self.maxima:
            each = [*seen, *self._assign("float", {f"m_{state.name}": state.contribution for state in self.maxima})]
            for top, state in zip(self.tops, self.maxima, strict=True):
                body.append(f"float v_{state.name} = s_{state.name}[r];")
                each.append(f"{top}[i] = seen ? m_{state.name} : NEGATIVE_INFINITY;")
                each.append(f"v_{state.name} = max(v_{state.name}, {top}[i]);")
                new |= {state.name: f"v_{state.name}", f"old_{state.name}": f"s_{state.name}[r]"}
            body += loop("j", "BLOCK", each)
        for root, name in self.factors.items():
            body += self._assign("", {f"{name}[r]": root}, new)
        body += [f"float b_{state.name} = 0.0;" for state in self.totals]
        if self.weights:
            contributions = {
                state.contribution: variable(top) for top, state in zip(self.tops, self.maxima, strict=True)
            }
            roots = substitute(self.weights, contributions)
            names = [f"p{i}" for i in range(len(roots))]
            each = [*seen, *self._assign("float", dict(zip(names, roots, strict=True)), new)]
            each += [f"w{i}[i] = seen ? {name} : 0.0;" for i, name in enumerate(names)]
            each += [f"b_{state.name} += {self.weights[state.contribution]}[i];" for state in self.totals]
            body += loop("j", "BLOCK", each)
        for state in self.totals:
            so_far: Expr = variable(state.name)
            if state.aligned is not None:
                known = {root: variable(name) for root, name in self.factors.items()}
                (so_far,) = substitute([state.aligned], known)
            names_now = {**new, state.name: f"s_{state.name}[r]", "_block": f"b_{state.name}"}
            body += self._assign("", {f"s_{state.name}[r]": plus(so_far, variable("_block"))}, names_now)
        body += [f"s_{state.name}[r] = v_{state.name};" for state in self.maxima]
        return lines + (loop("r", "ROWS", body) if body else [])

    def _finish(self) -> Lines:
        """What is written of the held rows."""
        fold = self.fold
        known = {state.name: f"s_{state.name}[r]" for state in fold.walk.states}
        body: Lines = []
        for name, result in fold.walk.results.items():
            body += self._assign("float", {f"v_{name}": result}, known)
            known[name] = f"v_{name}"
        used = named(fold.rows.values())
        read = [name for name in fold.held if name in used and name not in self.held]
        body += self._row_begins([*read, *fold.rows], "held", "HELD_ROW(r)")
        elements = {**known, **{name: self._held_element(name) for name in fold.held}}
        elements |= {one.name: f"a_{one.name}[r * HEAD_DIM + d]" for one in fold.sums}
        each = []
        for name, root in fold.rows.items():
            each += self._assign("", {f"args.p_{name}.v[at_{name} + d]": root}, elements)
        body += loop("d", "HEAD_DIM", each)
        for name, root in fold.values.items():
            body += self._assign("", {f"args.p_{name}.v[{self._value_place('held', 'HELD_ROW(r)')}]": root}, known)
        return loop("r", "ROWS", [Braces(body, head="if (HELD_ROW(r) < args.num_held)")])
