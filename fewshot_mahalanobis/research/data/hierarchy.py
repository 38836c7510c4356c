"""Groups of related classes, from which hierarchical episodes are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Hierarchy:
    """Groups of related classes, as in Meta-Dataset (Triantafillou et al., ICLR 2020, section 3.2).

    Attributes
    ----------
    groups : tuple of tuple of int
        Class indices of each group: the characters of an alphabet, or the leaves below a synset.
    whole : bool
        Whether an episode uses all classes of a group (ImageNet) or a random number of them (Omniglot).
    """

    groups: tuple[tuple[int, ...], ...]
    whole: bool

    @classmethod
    def alphabets(cls, class_names: Sequence[str]) -> Hierarchy:
        """Make one group per alphabet, from class names of the form ``<alphabet>.<character>``.

        Raises
        ------
        ValueError
            A class name contains no full stop.
        """
        groups: dict[str, list[int]] = {}
        for index, name in enumerate(class_names):
            alphabet, dot, _ = name.rpartition(".")
            if not dot:
                raise ValueError(f"class {name!r} names no alphabet: expected <alphabet>.<character>")
            groups.setdefault(alphabet, []).append(index)
        return cls(tuple(tuple(groups[alphabet]) for alphabet in sorted(groups)), whole=False)

    @classmethod
    def subtrees(cls, graph: Mapping[str, Set[str]], class_names: Sequence[str]) -> Hierarchy:
        """Make one group per inner node of ``graph`` (see :func:`sampling_graph`), ordered by node name.

        A group holds the classes below its node; leaves that are not in ``class_names`` are left out.
        """
        index = {name: i for i, name in enumerate(class_names)}
        below: dict[str, frozenset[str]] = {}

        def leaves(node: str) -> frozenset[str]:
            if node not in below:
                children = graph[node]
                below[node] = frozenset().union(*map(leaves, children)) if children else frozenset({node})
            return below[node]

        groups = [
            tuple(index[leaf] for leaf in sorted(leaves(node)) if leaf in index)
            for node in sorted(graph)
            if graph[node]
        ]
        return cls(tuple(group for group in groups if group), whole=True)


def sampling_graph(
    graph: Mapping[str, Set[str]], classes: Iterable[str], root: str | None = None
) -> dict[str, set[str]]:
    """Restrict an acyclic is-a graph, node to children, to the ancestors of ``classes``; collapse nodes with one child.

    Meta-Dataset applies it twice: to WordNet for the 1,000 classes of ILSVRC-2012, then to the result for the classes
    of each split. If ``root`` is given, only it and its descendants remain as inner nodes.
    """
    parents: dict[str, set[str]] = {}
    for node, children in graph.items():
        for child in children:
            parents.setdefault(child, set()).add(node)
    kept = _reachable(classes, parents)
    if root is not None:
        kept = (kept & _reachable([root], graph)) | set(classes)
    children_of = {node: [child for child in graph.get(node, ()) if child in kept] for node in kept}

    def past_single_children(node: str) -> str:
        while len(children_of[node]) == 1:
            node = children_of[node][0]
        return node

    return {
        node: {past_single_children(child) for child in children}
        for node, children in children_of.items()
        if len(children) != 1
    }


def _reachable(start: Iterable[str], steps: Mapping[str, Set[str]]) -> set[str]:
    """Nodes that can be reached from ``start``, itself included."""
    reached = set(start)
    waiting = list(reached)
    while waiting:
        new = steps.get(waiting.pop(), set()) - reached
        reached |= new
        waiting.extend(new)
    return reached
