"""Does a chat template take a message's content as one text, or as a list of parts?

The engine finds out from the template's syntax tree: a loop over the content means parts. Its
search follows names through assignments, loops and macro arguments, knows no scopes, and gives up
(for text) where an assignment or a loop unpacks several names. What it gets wrong changes the
prompt as much as what it gets right, so the same search is made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]
"""The engine's names for them: `string` is one text, `openai` is a list of parts."""


def detect_content_format(tree: nodes.Template) -> ContentFormat:
    """Say how the template behind `tree` takes content, as the engine does without being told."""
    try:
        loops_over_parts = next(_content_loops(tree), None) is not None
    except _UnpackingError:
        return "string"
    return "openai" if loops_over_parts else "string"


class _UnpackingError(Exception):
    """What is followed is bound to something other than one plain name."""


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    message_names = list(_message_names(tree))
    own_loops, loops_of_parameters = _macro_loops(tree, message_names)
    for loop in tree.find_all(nodes.For):
        iterates_content = any(_reads(loop.iter, name, "content") for name in message_names)
        if not iterates_content and isinstance(loop.iter, nodes.Name):
            if id(loop) in loops_of_parameters:
                iterates_content = loop.iter.name in loops_of_parameters[id(loop)]
            if id(loop) not in own_loops:
                iterates_content = loop.iter.name == "content"
        if iterates_content:
            _plain_name(loop.target)
            yield loop


def _macro_loops(
    tree: nodes.Template, message_names: list[str]
) -> tuple[set[int], dict[int, set[str]]]:
    """Find the loops inside macros, and for each the parameters that get a message's content."""
    inside: set[int] = set()
    parameters_of: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = _content_parameters(tree, macro, message_names)
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if parameters:
                parameters_of[id(loop)] = parameters
    return inside, parameters_of


def _content_parameters(
    tree: nodes.Template, macro: nodes.Macro, message_names: list[str]
) -> set[str]:
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        passed = list(zip(names, call.args, strict=False))
        passed += [(kw.key, kw.value) for kw in call.kwargs if kw.key in names]
        found.update(
            parameter
            for parameter, value in passed
            if any(_reads(value, name, "content") for name in message_names)
        )
    return found


def _message_names(tree: nodes.Template) -> Iterator[str]:
    lists = list(_names_of_messages(tree))
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            yield _plain_name(loop.target)


def _names_of_messages(tree: nodes.Template) -> Iterator[str]:
    """Follow assignments from `messages`, breadth first."""
    yield "messages"
    seen = {"messages"}
    waiting = ["messages"]
    while waiting:
        source = waiting.pop(0)
        for assignment in tree.find_all(nodes.Assign):
            if _reads(assignment.node, source):
                name = _plain_name(assignment.target)
                yield name
                if name not in seen:
                    seen.add(name)
                    waiting.append(name)


def _plain_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnpackingError
    return target.name


def _reads(node: nodes.Node | None, name: str, attribute: str | None = None) -> bool:
    """Whether `node` is the variable, or its attribute: filtered, tested or sliced or not."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            break
    if attribute is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getattr):
        return node.attr == attribute and _reads_plainly(node.node, name)
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == attribute
        and _reads_plainly(node.node, name)
    )


def _reads_plainly(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
