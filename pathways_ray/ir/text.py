"""Graphs and plans as text that a person can read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from pathways_ray.ir.graph import (
    Argument,
    Branch,
    Compute,
    Graph,
    Loop,
    Node,
    Part,
    Recipe,
    Ref,
    Regroup,
    Repeat,
    Result,
    Transfer,
    calls_in,
    host_part,
)
from pathways_ray.ir.plan import Call, Execute, IslandPlan, Receive, Reshard, Return, Send, Step
from pathways_ray.ir.plan import Regroup as RegroupStep
from pathways_ray.ir.verify_control import within


def graph_text(graph: Graph) -> str:
    """One line per node.

    The text of a program does not depend on how many devices its slices have, but for the line that names the slice.
    """
    lines = [f"program {graph.name} {{"]
    lines += [f"  {s}" for s in graph.slices]
    return "\n".join([*lines, *_nodes_text(graph, "  "), "}"])


def _nodes_text(graph: Graph, indent: str) -> list[str]:
    """The nodes of a graph, and behind a branch or a loop its bodies."""
    lines = []
    for index, node in enumerate(graph.nodes):
        lines.append(f"{indent}{node_text(graph, index)}")
        if isinstance(node, Branch | Repeat):
            for number, body in enumerate(node.bodies):
                title = f"branch {number}" if isinstance(node, Branch) else "test" if body is node.test else "round"
                lines.append(f"{indent}  {title} {{{f'    # {body.where}' if body.where else ''}")
                lines += _nodes_text(within(graph, body), indent + "    ")
                lines.append(f"{indent}  }}")
    return lines


def node_text(graph: Graph, index: int) -> str:
    node: Node = graph.nodes[index]
    match node:
        case Argument():
            return f"%{index} = argument {node.index} : {node.type} @ {node.layout}"
        case Transfer():
            origin = graph.layout_of(node.input)
            return f"%{index} = transfer {node.input} : {node.type} {origin} -> {node.layout}"
        case Regroup():
            return f"%{index} = regroup {_refs(node.inputs)} : {node.type} @ {node.layout}"
        case Result():
            return f"result {_refs(node.inputs)}"
        case Branch() | Repeat():
            outputs = ", ".join(f"{t} @ {p}" for t, p in zip(node.outputs, node.output_layouts, strict=True))
            how = (
                f"switch {node.index}" if isinstance(node, Branch) else "while" if node.test else f"{node.times} times"
            )
            where = f"    # {node.where}" if node.where else ""
            return f"%{index} = {how}: {node.name}({_refs(node.inputs)}) : {outputs}{where}"
        case Compute():
            outputs = ", ".join(f"{t} @ {p}" for t, p in zip(node.outputs, node.output_layouts, strict=True))
            donated = f" donating {', '.join(str(node.inputs[k]) for k in node.donated)}" if node.donated else ""
            parts = fusion_text(graph.recipes[node.recipe])
            where = f"    # {node.where}" if node.where else ""
            host = "host " if host_part(graph.recipes[node.recipe]) is not None else ""
            return f"%{index} = {host}{node.name}({_refs(node.inputs)}){parts}{donated} : {outputs}{where}"


def fusion_text(recipe: Recipe) -> str:
    """The calls that a recipe composes, such as " fused=128 as 128 x (f)"; empty for a single function."""
    calls = calls_in(recipe.parts)
    shown = f" as {recipe_text(recipe)}" if any(isinstance(part, Loop) for part in recipe.parts) else ""
    return f" fused={calls}{shown}" if calls > 1 else shown


def recipe_text(recipe: Recipe) -> str:
    """The parts of a recipe by name, with loops as "128 x (f; g)"."""
    return _parts_text(recipe.parts)


def _parts_text(parts: Iterable[Part | Loop]) -> str:
    texts = [f"{p.times} x ({_parts_text(p.body)})" if isinstance(p, Loop) else p.name for p in parts]
    counted = [(text, sum(1 for _ in same)) for text, same in itertools.groupby(texts)]
    return "; ".join(text if count == 1 else f"{text}, {count} times" for text, count in counted)


def _refs(refs: Iterable[Ref]) -> str:
    return ", ".join(map(str, refs))


def plan_text(plans: tuple[IslandPlan, ...]) -> str:
    """The steps of every island, one line each."""
    lines = []
    for island in plans:
        lines.append(f"island {island.island} {{")
        lines += [
            f"  {s.mesh} = devices {', '.join(map(str, s.devices))}" for s in island.slices if s.island == island.island
        ]
        lines += [f"  s{slot} = argument {number}" for slot, number in island.arguments]
        lines += [f"  {_step_text(island, step)}" for step in island.steps]
        lines += [f"  result {number} = s{slot}" for slot, number in island.results]
        lines.append("}")
    return "\n".join(lines)


def _step_text(plan: IslandPlan, step: Step) -> str:
    match step:
        case Execute():
            label, recipe = plan.labels[step.node].name, plan.executables[step.executable].recipe
            text = f"[{step.gang}] {_slots(step.outputs)} = execute {label}({_slots(step.inputs)}){fusion_text(recipe)}"
        case Call():
            return f"[{step.gang}] call {plan.labels[step.node].name}({_slots(step.inputs)})"
        case Return():
            text = f"[{step.gang}] {_slots(step.outputs)} = return of {plan.labels[step.node].name}"
        case Send():
            text = f"[{step.gang}] send {_slots(step.sources)} {_bundle_text(plan, step.bundle)}"
        case Reshard():
            bundle = _bundle_text(plan, step.bundle)
            text = f"[{step.gang}] {_slots(step.targets)} = reshard {_slots(step.sources)} {bundle}"
        case RegroupStep():
            text = f"[{step.gang}] s{step.target} = regroup {_slots(step.sources)}: {step.type} @ {step.layout}"
        case Receive():
            return f"[{step.gang}] {_slots(step.targets)} = receive {_bundle_text(plan, step.bundle)}"
    return text + (f"; drop {_slots(step.drops)}" if step.drops else "")


def _bundle_text(plan: IslandPlan, number: int) -> str:
    edges = ", ".join(f"{edge.type} {edge.source} -> {edge.target}" for edge in plan.bundles[number].edges)
    return f"bundle {number}: {edges}"


def _slots(slots: tuple[int, ...]) -> str:
    return ", ".join(f"s{slot}" for slot in slots)


def order_text(plans: Mapping[int, IslandPlan]) -> str:
    """The order in which gangs and transfers reach the devices, one line per gang over all islands."""
    lines: dict[int, list[str]] = {}
    for island in plans.values():
        for step in island.steps:
            match step:
                case Execute():
                    text = f"{island.labels[step.node].name} on island {island.island}"
                case Send():
                    types = [edge.type for edge in island.bundles[step.bundle].edges]
                    size = sum(kind.nbytes for kind in types)
                    text = f"send {', '.join(map(str, types))} ({size} bytes) from island {island.island}"
                case Receive():
                    text = f"receive on island {island.island}"
                case Call():
                    text = f"call {island.labels[step.node].name} on hosts of island {island.island}"
                case Return():
                    text = f"return of {island.labels[step.node].name} on island {island.island}"
                case RegroupStep():
                    text = f"regroup on island {island.island}"
                case _:
                    text = f"reshard on island {island.island}"
            lines.setdefault(step.gang, []).append(text)
    return "\n".join(f"gang {gang}: {'; '.join(parts)}" for gang, parts in sorted(lines.items()))
