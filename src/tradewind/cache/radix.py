"""One prefix tree over page-sized chunks of tokens: which computed pages can be used again.

Knows: chunk keys, the page of each chunk in each group, who locks a path, and which unlocked leaf was used longest ago.
Refuses to know: sequences, slots, steps; it moves no bytes.

A node holds a run of chunks; a border between nodes is always a page border. Roots are apart per (salt, adapter):

      root(salt, adapter)
        '-- [c0 c1 c2]            locks 2      pages, group 0 (full):    7  8  9
              |-- [c3 c4]         locks 1                group 1 (window): 0  0  5     0 = dropped ("tombstone")
              '-- [c5]            locks 0  <- in the eviction order

      A lease locks its node and every node above it, and refers to every full page on that path. So:
        a full page is idle (no lease)      <=>  its node is unlocked
        children of an unlocked node        are unlocked, and come before it in the eviction order
      therefore the oldest unlocked node is always a leaf, and every idle page can be evicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tradewind.cache.pages import NULL_PAGE, PagePool
from tradewind.cache.rules import GroupRule

Namespace = tuple[str, str]
"""(cache salt, adapter): prefixes of different namespaces never meet."""


class Node:
    """A run of chunks with their pages by group; written by the tree only."""

    __slots__ = ("children", "keys", "locks", "pages", "parent")

    def __init__(self, *, parent: Node | None, keys: list[bytes], pages: list[list[int]]) -> None:
        self.parent = parent
        self.keys = keys
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.locks = 0


class RadixTree:
    """The tree and its eviction order. `rules` and `pools` are by group index."""

    def __init__(self, *, pools: Sequence[PagePool], rules: Sequence[GroupRule], full: Sequence[bool]) -> None:
        self._pools = pools
        self._rules = rules
        self._full = full
        self._roots: dict[Namespace, Node] = {}
        self._names: dict[Node, Namespace] = {}
        self._unlocked: dict[Node, None] = {}
        """Unlocked nodes, least recently used first (a dict keeps insertion order)."""
        self._locked: dict[Node, None] = {}

    def match(self, namespace: Namespace, keys: Sequence[bytes], *, limit: int) -> int:
        """The number of leading chunks, at most `limit`, whose pages every group can reuse; changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        path, depth = self._walk(root, keys, limit)
        return self._reusable(path, depth) if depth else 0

    def acquire(self, namespace: Namespace, keys: Sequence[bytes], *, limit: int) -> tuple[Node, list[list[int]]]:
        """Locks the longest reusable prefix and refers to its pages on behalf of one lease.

        Returns the locked node and, by group, one page id per chunk of the prefix: null where the rule no longer needs the page.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(parent=None, keys=[], pages=[[] for _ in self._pools])
            self._names[root] = namespace
        path, depth = self._walk(root, keys, limit)
        length = self._reusable(path, depth) if depth else 0
        pages = self._gather(path, length)  # before a split moves them
        node = root
        left = length
        for step, _ in path:
            if left == 0:
                break
            node = step if left >= len(step.keys) else self._split(step, left)
            left -= len(node.keys)
        for group, (pool, rule) in enumerate(zip(self._pools, self._rules, strict=True)):
            own = pages[group]
            if length:
                # The next token computed is the one after the prefix: what it cannot see is not referred to.
                for index in range(rule.droppable(length * rule.page_tokens)):
                    own[index] = NULL_PAGE
            for page in own:
                if page != NULL_PAGE:
                    pool.share(page)
        self._lock_path(node)
        return node, pages

    def publish(
        self, node: Node, keys: Sequence[bytes], pages: Sequence[list[int]], *, first: int
    ) -> tuple[Node, list[tuple[int, int, int]]]:
        """Hangs the chunks keys[first:] with their pages below a lease's locked node and moves its lock down.

        `pages[group]` is the lease's own list by chunk. Where the tree already holds a chunk, the lease is switched to the tree's page
        (so that equal chunks are kept once): `pages` is changed in place and the replaced pages are returned as
        (group, chunk index, own page), still referred to; the caller drops them when no step uses them any more.
        """
        swapped: list[tuple[int, int, int]] = []
        at = first
        end = len(keys)
        while at < end:
            child = node.children.get(keys[at])
            if child is None:
                node = self._append(node, keys, pages, at, end)
                break
            run = _common(child.keys, keys, at, end)
            if run < len(child.keys):
                child = self._split(child, run)
            self._meet(child, pages, at, run, swapped)
            self._lock_one(child)
            node = child
            at += run
        return node, swapped

    def release(self, node: Node) -> None:
        """Unlocks a node and those above it; what nobody locks any more enters the eviction order, leaf first."""
        walk: Node | None = node
        while walk is not None:
            assert walk.locks > 0, "a node was unlocked more often than locked"
            walk.locks -= 1
            if walk.locks == 0:
                del self._locked[walk]
                if walk.parent is None and not walk.children:
                    self._drop_root(walk)
                elif walk.parent is not None:
                    self._unlocked[walk] = None
            walk = walk.parent

    def evict(self, group: int, count: int) -> int:
        """Forgets idle pages, oldest leaf first, until `count` pages of the group are freed; returns how many were."""
        pool = self._pools[group]
        goal = pool.free + count
        while pool.free < goal and self._unlocked:
            self._trim(next(iter(self._unlocked)), group, goal)
        if pool.free < goal and not self._full[group]:
            for node in self._locked:
                for index, page in enumerate(node.pages[group]):
                    if page != NULL_PAGE and pool.refs(page) == 0:
                        pool.forget(page)
                        node.pages[group][index] = NULL_PAGE
                        if pool.free >= goal:
                            return count
        return count - max(0, goal - pool.free)

    def clear(self) -> None:
        """Forgets everything that no lease locks."""
        while self._unlocked:
            self._trim(next(iter(self._unlocked)), 0, self._pools[0].total + 1)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _walk(self, root: Node, keys: Sequence[bytes], limit: int) -> tuple[list[tuple[Node, int]], int]:
        """The path of nodes whose chunks agree with `keys`, each with how many do; and their sum."""
        limit = min(limit, len(keys))
        path: list[tuple[Node, int]] = []
        node, depth = root, 0
        while depth < limit:
            child = node.children.get(keys[depth])
            if child is None:
                break
            run = _common(child.keys, keys, depth, limit)
            path.append((child, run))
            depth += run
            if run < len(child.keys):
                break
            node = child
        return path, depth

    def _gather(self, path: list[tuple[Node, int]], length: int) -> list[list[int]]:
        pages: list[list[int]] = [[] for _ in self._pools]
        for node, used in path:
            for group, own in enumerate(pages):
                own.extend(node.pages[group][:used])
        return [own[:length] for own in pages]

    def _reusable(self, path: list[tuple[Node, int]], depth: int) -> int:
        """The longest length that every group's rule accepts: a fixed point, as one group's cut may uncover another's hole."""
        pages = self._gather(path, depth)
        while True:
            length = depth
            for group, rule in enumerate(self._rules):
                length = rule.reusable(pages[group], length)
            if length == depth:
                return length
            depth = length

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node into [0, at) and [at, end) and returns the upper part. The lower keeps its identity, for leases point at it.

        The upper part is not put in the eviction order: every caller locks it next.
        """
        upper = Node(parent=node.parent, keys=node.keys[:at], pages=[own[:at] for own in node.pages])
        upper.locks = node.locks
        if upper.locks:
            self._locked[upper] = None
        assert node.parent is not None, "a root has no chunks to split"
        node.parent.children[upper.keys[0]] = upper
        node.keys = node.keys[at:]
        node.pages = [own[at:] for own in node.pages]
        node.parent = upper
        upper.children[node.keys[0]] = node
        return upper

    def _lock_one(self, node: Node) -> None:
        if node.locks == 0:
            self._unlocked.pop(node, None)
            self._locked[node] = None
        node.locks += 1

    def _lock_path(self, node: Node) -> None:
        walk: Node | None = node
        while walk is not None:
            self._lock_one(walk)
            walk = walk.parent

    def _meet(
        self, node: Node, pages: Sequence[list[int]], at: int, run: int, swapped: list[tuple[int, int, int]]
    ) -> None:
        """A lease publishes chunks that the tree has: use the tree's pages, and fill its tombstones from the lease's."""
        for group, pool in enumerate(self._pools):
            own, tree = pages[group], node.pages[group]
            for index in range(run):
                mine, theirs = own[at + index], tree[index]
                if mine in (theirs, NULL_PAGE):
                    continue
                if theirs == NULL_PAGE:
                    pool.adopt(mine)
                    tree[index] = mine
                else:
                    pool.share(theirs)
                    own[at + index] = theirs
                    swapped.append((group, at + index, mine))

    def _append(self, node: Node, keys: Sequence[bytes], pages: Sequence[list[int]], at: int, end: int) -> Node:
        """New chunks below a lease's locked node, which the tree keeps from now on; returns the node that holds the last of them."""
        for group, pool in enumerate(self._pools):
            for page in pages[group][at:end]:
                if page != NULL_PAGE:
                    pool.adopt(page)
        if node.parent is not None and not node.children and node.locks == 1:
            # Only the publishing lease is here: the node may grow. With another lease's lock it would cover pages that lease has no
            # reference to.
            node.keys.extend(keys[at:end])
            for group, own in enumerate(node.pages):
                own.extend(pages[group][at:end])
            return node
        child = Node(parent=node, keys=list(keys[at:end]), pages=[own[at:end] for own in pages])
        node.children[keys[at]] = child
        self._lock_one(child)
        return child

    def _trim(self, leaf: Node, group: int, goal: int) -> None:
        """Cuts chunks off an unlocked leaf's end until the group has `goal` free pages; removes the leaf when it is empty."""
        assert not leaf.children and leaf.locks == 0 and leaf.parent is not None, (
            "eviction order: the oldest node is no free leaf"
        )
        wanted = self._pools[group]
        first_key = leaf.keys[0]
        while leaf.keys and wanted.free < goal:
            leaf.keys.pop()
            for pool, own in zip(self._pools, leaf.pages, strict=True):
                page = own.pop()
                if page != NULL_PAGE:
                    pool.forget(page)
        if not leaf.keys:
            del self._unlocked[leaf]
            parent = leaf.parent
            del parent.children[first_key]
            if parent.parent is None and not parent.children and parent.locks == 0:
                self._drop_root(parent)

    def _drop_root(self, root: Node) -> None:
        del self._roots[self._names.pop(root)]

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self, *, retiring: frozenset[tuple[int, int]] = frozenset()) -> None:
        """Raises AssertionError where the drawing at the head of this file does not hold; for tests, O(nodes).

        `retiring` are (group, page) that a flying step still holds without a lease.
        """
        order = {node: place for place, node in enumerate(self._unlocked)}
        held: list[set[int]] = [set() for _ in self._pools]
        for node in self._nodes():
            for child_key, child in node.children.items():
                assert child.parent is node and child.keys and child.keys[0] == child_key
                assert child.locks <= node.locks, "a child is locked more often than its parent"
                if node.parent is not None and node.locks == 0:
                    assert order[child] < order[node], "a child comes after its parent in the eviction order"
            assert (node in self._locked) == (node.locks > 0)
            if node.parent is not None:
                assert (node in self._unlocked) == (node.locks == 0)
            for group, own in enumerate(node.pages):
                assert len(own) == len(node.keys)
                for page in own:
                    if page == NULL_PAGE:
                        assert not self._full[group], "a full group's page is missing in the tree"
                        continue
                    assert page not in held[group], f"page {page} of group {group} is in the tree twice"
                    held[group].add(page)
                    if self._full[group] and (group, page) not in retiring:
                        assert (self._pools[group].refs(page) > 0) == (node.locks > 0), "lock and references disagree"
        for pool, pages in zip(self._pools, held, strict=True):
            assert len(pages) == pool.in_tree, "the pool counts other pages in the tree than the tree holds"


def _common(run: Sequence[bytes], keys: Sequence[bytes], at: int, limit: int) -> int:
    """How many chunks of `run` agree with keys[at:limit], from the first on."""
    size = min(len(run), limit - at)
    if run[:size] == keys[at : at + size]:
        return size
    count = 0
    while run[count] == keys[at + count]:
        count += 1
    return count
