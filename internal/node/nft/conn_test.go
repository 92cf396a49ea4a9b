package nft

import (
	"maps"
	"os/exec"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

var table = Table{Family: unix.NFPROTO_INET, Name: "t"}

// nft runs one command of nft's.
func nft(t *testing.T, command string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "nft", command).CombinedOutput()
	if err != nil {
		t.Fatalf("nft %s: %v: %s", command, err, out)
	}
	return string(out)
}

func commit(t *testing.T, c *Conn, tx *Transaction) Committed {
	t.Helper()
	done, err := c.Commit(t.Context(), tx)
	if err != nil {
		t.Fatal(err)
	}
	return done
}

func key(addr, port byte) string { return string([]byte{10, 0, 0, addr, 0, port, 0, 0}) }

func TestATableIsReadAsItWasWritten(t *testing.T) {
	netnstest.Enter(t)
	var c Conn
	defer c.Close()
	fields := []Field{AddrField(IPv4), PortField}
	chain := &Chain{Name: "c", Rules: []*Rule{(&Rule{Comment: "x"}).Counter().Drop()}}
	base := &Chain{Name: "b", Hook: &Hook{Type: "filter", Num: unix.NF_INET_FORWARD, Priority: -7}, Rules: []*Rule{(&Rule{}).Jump("c")}}
	sets := []struct {
		Set
		elements map[string]*Value
	}{
		{Set{Name: "set", Key: fields, Counted: true}, map[string]*Value{key(1, 80): {Comment: "web"}}},
		{Set{Name: "map", Key: fields, Data: []Field{AddrField(IPv4)}}, map[string]*Value{key(1, 80): {Data: "\x0a\x00\x00\x02"}}},
		{Set{Name: "jumps", Key: fields, Verdict: true}, map[string]*Value{key(1, 80): {Jump: "c"}}},
		{Set{Name: "ranges", Key: fields, Interval: true}, map[string]*Value{key(1, 80): {KeyEnd: key(1, 90)}}},
		{Set{Name: "tree", Key: fields[:1], Interval: true}, map[string]*Value{"\x0a\x00\x00\x00": {}, "\x0a\x00\x01\x00": {IntervalEnd: true}}},
	}
	tx := NewTransaction(table)
	for _, s := range sets {
		tx.AddElements(s.Name, maps.All(s.elements))
		tx.AddSet(&s.Set)
	}
	tx.Chains(nil, []*Chain{base, chain})
	tx.AddTable()
	if err := c.Check(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	if l, err := c.Read(t.Context(), table, true); err != nil || l.Exists {
		t.Fatalf("a check made a table: %v", err)
	}
	commit(t, &c, tx)
	l, err := c.Read(t.Context(), table, true)
	if err != nil || !l.Active() {
		t.Fatal(l, err)
	}
	for _, s := range sets {
		if have := l.Sets[s.Name]; have == nil || !have.Is(&s.Set) || !reflect.DeepEqual(have.Elements, s.elements) {
			t.Errorf("set %s is read as %+v", s.Name, have)
		}
	}
	for _, ch := range []*Chain{base, chain} {
		if have := l.Chains[ch.Name]; have == nil || !have.Is(ch.Hook) || have.Sums != ch.Sums() {
			t.Errorf("chain %s is read as %+v", ch.Name, have)
		}
	}
	for addr, want := range map[byte]bool{1: true, 2: false} {
		if v, err := c.Element(t.Context(), table, "ranges", key(addr, 85)); err != nil || (v != nil) != want {
			t.Errorf("element of 10.0.0.%d is %v, %v", addr, v, err)
		}
	}
	if v, err := c.Elements(t.Context(), table, "none"); v != nil || err != nil {
		t.Errorf("elements of no set: %v, %v", v, err)
	}
}

func TestOnlyOtherProgramsAreNoticed(t *testing.T) {
	netnstest.Enter(t)
	var c Conn
	defer c.Close()
	changed := make(chan bool, 10)
	if err := c.Watch(table, func() { changed <- true }); err != nil {
		t.Fatal(err)
	}
	tx := NewTransaction(table)
	tx.AddTable()
	g, err := c.Generation(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	g, alone := commit(t, &c, tx).Follows(g)
	if !alone {
		t.Error("own commit counts as another program's")
	}
	nft(t, "add table inet other")
	select {
	case <-changed:
		t.Error("own change, or one of another table, is reported")
	case <-time.After(100 * time.Millisecond):
	}
	nft(t, "add chain inet t c")
	select {
	case <-changed:
	case <-time.After(time.Minute):
		t.Error("a change is not reported")
	}
	if _, alone := commit(t, &c, tx).Follows(g); alone {
		t.Error("another program's commit is not noticed")
	}
}

func TestARefusalNamesTheChange(t *testing.T) {
	netnstest.Enter(t)
	var c Conn
	defer c.Close()
	tx := NewTransaction(table)
	tx.AddTable()
	tx.AddElements("none", maps.All(map[string]*Value{"\x00\x50\x00\x00": {}}))
	if _, err := c.Commit(t.Context(), tx); err == nil || !strings.HasPrefix(err.Error(), "add elements to t none: ") {
		t.Errorf("error %v", err)
	}
	if tables, err := c.Tables(t.Context()); err != nil || len(tables) > 0 {
		t.Errorf("tables %v, %v", tables, err)
	}
}

// The answers to so many changes would not fit into the socket's buffer.
func TestABatchMayHaveManyChanges(t *testing.T) {
	netnstest.Enter(t)
	var c Conn
	defer c.Close()
	ch := &Chain{Name: "c"}
	for range 10_000 {
		ch.Rules = append(ch.Rules, (&Rule{}).Counter())
	}
	tx := NewTransaction(table)
	tx.AddTable()
	tx.AddChain(ch)
	commit(t, &c, tx)
	n := 0
	if _, err := c.Rules(t.Context(), table, func(ListedRule) bool { n++; return n < 5000 }); err != nil || n != 5000 {
		t.Errorf("%d rules, %v", n, err)
	}
	if _, err := c.Generation(t.Context()); err != nil { // after the end of a dump in its middle
		t.Error(err)
	}
}
