package iptables

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// shape formats a tree as text.
func shape(t *trie) string {
	var b strings.Builder
	t.top.walk(func(n *trieNode) {
		fmt.Fprintf(&b, "%q %d", n.prefix, n.count)
		for _, e := range n.entries {
			fmt.Fprintf(&b, " %s", e.key)
		}
		b.WriteString("\n")
	})
	return b.String()
}

func randomKey(r *rand.Rand, spread int) string {
	digits := []byte("0312030000")
	for i := len(digits) - spread; i < len(digits); i++ {
		digits[i] = byte('0' + r.IntN(4))
	}
	return string(digits)
}

func TestTheShapeOfATreeDependsOnItsKeysAlone(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 60 {
		spread := 1 + round%10
		var changed trie
		keys := map[string]bool{}
		for range 300 {
			key := randomKey(r, spread)
			if r.IntN(3) == 0 || r.IntN(len(keys)+1) > 60 {
				delete(keys, key)
				changed.remove(key, "me")
			} else {
				keys[key] = true
				changed.set(entry{key: key, owner: "me", rule: key})
			}
			var fresh trie
			order := make([]string, 0, len(keys))
			for k := range keys {
				order = append(order, k)
			}
			for _, i := range r.Perm(len(order)) {
				fresh.set(entry{key: order[i], owner: "me", rule: order[i]})
			}
			if got, want := shape(&changed), shape(&fresh); got != want {
				t.Fatalf("round %d, %d keys: the tree is\n%s\nand from scratch\n%s", round, len(keys), got, want)
			}
		}
	}
}

func TestATreeSaysEveryNodeThatChanged(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var tree trie
	written := map[string]string{}
	for step := range 20000 {
		key := randomKey(r, 6)
		if r.IntN(2) == 0 {
			tree.remove(key, "me")
		} else {
			tree.set(entry{key: key, owner: "me", rule: fmt.Sprint(step)})
		}
		for prefix := range tree.dirty {
			written[prefix] = text(&tree, prefix)
			if written[prefix] == "" {
				delete(written, prefix)
			}
		}
		clear(tree.dirty)
		if step%100 != 0 {
			continue
		}
		want := map[string]string{}
		if top := text(&tree, topPrefix); top != "" {
			want[topPrefix] = top
		}
		tree.top.walk(func(n *trieNode) { want[n.prefix] = text(&tree, n.prefix) })
		if fmt.Sprint(written) != fmt.Sprint(want) {
			t.Fatalf("step %d: written is\n%v\nwant\n%v", step, written, want)
		}
	}
}

// text returns the rules of a chain of the tree.
func text(tree *trie, prefix string) string {
	if prefix == topPrefix {
		if tree.top == nil {
			return ""
		}
		return "to " + tree.top.prefix + "."
	}
	n := tree.find(prefix)
	if n == nil {
		return ""
	}
	var out []string
	for _, e := range n.entries {
		out = append(out, e.key+"="+e.rule)
	}
	for _, child := range n.children {
		if child != nil {
			out = append(out, "to "+child.prefix)
		}
	}
	return strings.Join(out, ";")
}

func TestAnEntryIsRemovedOnlyByItsOwner(t *testing.T) {
	var tree trie
	tree.set(entry{key: "0123", owner: 1})
	tree.set(entry{key: "0123", owner: 2, rule: "second"})
	tree.remove("0123", 1)
	if n := tree.find(""); n == nil || len(n.entries) != 1 || n.entries[0].rule != "second" {
		t.Errorf("the entry of another owner is gone: %s", shape(&tree))
	}
	tree.remove("0123", 2)
	if tree.top != nil {
		t.Errorf("left over: %s", shape(&tree))
	}
}

func TestNoWayThroughATreeIsLong(t *testing.T) {
	var tree trie
	for i := range 10000 {
		key := make([]byte, 12)
		for d, n := 11, i; d >= 0; d, n = d-1, n/4 {
			key[d] = byte('0' + n%4)
		}
		tree.set(entry{key: string(key), owner: i})
	}
	longest, chains := 0, 0
	var down func(n *trieNode, walked int)
	down = func(n *trieNode, walked int) {
		chains++
		if n.leaf() {
			longest = max(longest, walked+len(n.entries))
			return
		}
		for _, child := range n.children {
			if child != nil {
				walked++
				down(child, walked)
			}
		}
	}
	down(tree.top, 0)
	if longest > 40 || chains > 10000/8 {
		t.Errorf("%d rules to the last Service of 10,000, in %d chains", longest, chains)
	}
	if i := slices.IndexFunc(tree.top.children[:], func(n *trieNode) bool { return n != nil }); i < 0 {
		t.Error("no tree at all")
	}
}
