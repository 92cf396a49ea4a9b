package iptables

import (
	"slices"
	"strings"
)

// The dispatch is a tree of chains over the bits of a destination, two at a time. So
// neither a packet nor a change meets all Services. A packet walks some 3 rules for each
// level and at most leafSize at the end. A change rewrites the one chain that names its
// address.
//
//	SPW-ADDRESSES        -d 10.96.0.0/18     -j SPW-10.96.0.0/18
//	SPW-10.96.0.0/18     -d 10.96.16.0/20    -j SPW-10.96.16.0/20     (one of ≤ 4)
//	SPW-10.96.16.0/20    -d 10.96.16.5/32 -p tcp --dport 80 -j SPW-SVC-…  (one of ≤ leafSize)
//
// The shape depends on the content of the tree and not on its history, so incremental
// syncs leave the same chains as one full sync:
//
//   - a set of at most leafSize keys is a leaf: one chain that lists them;
//   - a larger one is an inner node at the longest prefix that its keys share,
//     with a child for each next digit.
//
// The total number of rules matters as much as the number of rules walked.
// iptables-legacy copies the whole table at each commit, and a chain costs it two rules
// of its own.
const leafSize = 16

// A key is a string of digits '0' to '3'. All keys of a trie have one length.
type entry struct {
	key   string
	owner any    // who may remove it
	rule  string // the rule in a leaf's chain
}

// trie is the tree of one dispatch. Its zero value is empty.
type trie struct {
	top *trieNode
	// dirty holds the prefixes of nodes that were added, deleted or changed since the
	// caller last emptied it.
	dirty map[string]struct{}
}

// topPrefix represents in trie.dirty the chain that jumps to the top.
const topPrefix = "top"

type trieNode struct {
	prefix   string
	count    int          // entries below
	children [4]*trieNode // of an inner node
	entries  []entry      // of a leaf, sorted by key
}

func (n *trieNode) leaf() bool { return n.entries != nil }

func (t *trie) markDirty(prefix string) {
	if t.dirty == nil {
		t.dirty = map[string]struct{}{}
	}
	t.dirty[prefix] = struct{}{}
}

// set adds an entry, or replaces the entry of the same key.
func (t *trie) set(e entry) { t.replaceTop(t.insert(t.top, "", e)) }

// remove deletes the entry of a key if it belongs to owner.
func (t *trie) remove(key string, owner any) { t.replaceTop(t.removeEntry(t.top, "", key, owner)) }

func (t *trie) replaceTop(n *trieNode) {
	if !sameNode(t.top, n) {
		t.markDirty(topPrefix)
	}
	t.top = n
}

// sameNode reports whether the same rule jumps to both nodes.
func sameNode(a, b *trieNode) bool {
	return (a == nil) == (b == nil) && (a == nil || a.prefix == b.prefix)
}

// insert adds e below n, the node at slot, and returns the new node at slot.
func (t *trie) insert(n *trieNode, slot string, e entry) *trieNode {
	switch {
	case n == nil:
		t.markDirty(slot)
		return &trieNode{prefix: slot, count: 1, entries: []entry{e}}
	case n.leaf():
		t.markDirty(n.prefix)
		at, found := slices.BinarySearchFunc(n.entries, e.key, compareKey)
		if found {
			n.entries[at] = e
			return n
		}
		n.entries = slices.Insert(n.entries, at, e)
		n.count++
		if n.count <= leafSize {
			return n
		}
		return t.build(n.entries, slot)
	}
	if shared := common(n.prefix, e.key); shared < len(n.prefix) {
		above := &trieNode{prefix: e.key[:shared], count: n.count + 1}
		t.markDirty(above.prefix)
		above.children[digit(n.prefix, shared)] = n
		above.children[digit(e.key, shared)] = t.insert(nil, e.key[:shared+1], e)
		return above
	}
	before := n.total()
	at := digit(e.key, len(n.prefix))
	t.setChild(n, at, t.insert(n.children[at], e.key[:len(n.prefix)+1], e))
	n.count += n.total() - before
	return n
}

// removeEntry deletes the entry of key below n, the node at slot, and returns the new
// node at slot.
func (t *trie) removeEntry(n *trieNode, slot, key string, owner any) *trieNode {
	if n == nil || !strings.HasPrefix(key, n.prefix) {
		return n
	}
	if n.leaf() {
		at, found := slices.BinarySearchFunc(n.entries, key, compareKey)
		if !found || n.entries[at].owner != owner {
			return n
		}
		t.markDirty(n.prefix)
		n.count--
		if n.count == 0 {
			return nil
		}
		n.entries = slices.Delete(n.entries, at, at+1)
		return n
	}
	at := digit(key, len(n.prefix))
	t.setChild(n, at, t.removeEntry(n.children[at], key[:len(n.prefix)+1], key, owner))
	n.count = n.total()
	if n.count <= leafSize {
		return t.collapse(n, slot)
	}
	if only := n.onlyChild(); only != nil {
		// It holds more than leafSize entries, so it is an inner node with a prefix of
		// its own.
		return only
	}
	return n
}

// setChild sets a child of an inner node.
func (t *trie) setChild(n *trieNode, at int, child *trieNode) {
	if !sameNode(n.children[at], child) {
		t.markDirty(n.prefix)
	}
	n.children[at] = child
}

// build creates the nodes at slot for entries, which are sorted by key.
func (t *trie) build(entries []entry, slot string) *trieNode {
	if len(entries) <= leafSize {
		t.markDirty(slot)
		return &trieNode{prefix: slot, count: len(entries), entries: slices.Clone(entries)}
	}
	shared := common(entries[0].key, entries[len(entries)-1].key)
	n := &trieNode{prefix: entries[0].key[:shared], count: len(entries)}
	t.markDirty(n.prefix)
	for len(entries) > 0 {
		d := digit(entries[0].key, shared)
		end := slices.IndexFunc(entries, func(e entry) bool { return digit(e.key, shared) != d })
		if end < 0 {
			end = len(entries)
		}
		n.children[d] = t.build(entries[:end], entries[0].key[:shared+1])
		entries = entries[end:]
	}
	return n
}

// collapse merges all entries below n into one leaf.
func (t *trie) collapse(n *trieNode, slot string) *trieNode {
	leaf := &trieNode{prefix: slot, entries: make([]entry, 0, n.count)}
	n.walk(func(below *trieNode) {
		t.markDirty(below.prefix)
		leaf.entries = append(leaf.entries, below.entries...)
	})
	leaf.count = len(leaf.entries)
	t.markDirty(slot)
	return leaf
}

// find returns the node of exactly this prefix, or nil.
func (t *trie) find(prefix string) *trieNode {
	n := t.top
	for n != nil && n.prefix != prefix {
		if n.leaf() || len(n.prefix) >= len(prefix) || !strings.HasPrefix(prefix, n.prefix) {
			return nil
		}
		n = n.children[digit(prefix, len(n.prefix))]
	}
	return n
}

// walk calls f for n and all nodes below, in the order of their keys.
func (n *trieNode) walk(f func(*trieNode)) {
	if n == nil {
		return
	}
	f(n)
	for _, child := range n.children {
		child.walk(f)
	}
}

func (n *trieNode) total() int {
	sum := 0
	for _, child := range n.children {
		if child != nil {
			sum += child.count
		}
	}
	return sum
}

// onlyChild returns the child of an inner node that has one child, else nil.
func (n *trieNode) onlyChild() *trieNode {
	var only *trieNode
	for _, child := range n.children {
		switch {
		case child == nil:
		case only != nil:
			return nil
		default:
			only = child
		}
	}
	return only
}

func compareKey(e entry, key string) int { return strings.Compare(e.key, key) }

func digit(key string, at int) int { return int(key[at] - '0') }

// common counts the digits that two keys share from the left.
func common(a, b string) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}
