package nftables

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/nft"
)

// heard waits for the backend to hear of a change.
func heard(b *Backend, patience time.Duration) bool {
	select {
	case <-b.Drifted():
		return true
	case <-time.After(patience):
		return false
	}
}

func TestEditsByOthersAreHeardAndToldAsRepairs(t *testing.T) {
	enter(t)
	b := open(t)
	s := intent.State{Node: node(), Ports: shapes()["many"]}
	replace(t, b, s)
	want := holds(t, b)
	for _, test := range []struct{ edit, first string }{
		{"flush ruleset", "table"},
		{"delete table inet spillway", "table"},
		{"flush table inet spillway", "rules of chain"},
		{"flush chain inet spillway services4", "rules of chain services4"},
		{"flush map inet spillway services4-16", "element of services4-16"},
		{"delete element inet spillway services4 { 10.96.0.1 . tcp . 80 }", "element of services4"},
		{"add element inet spillway services4 { 10.96.9.9 . tcp . 80 }", "element of services4"},
		{"add chain inet spillway mine", "chain mine"},
		{"add set inet spillway mine { type ipv4_addr; }", "set mine"},
		{"add table inet spillway { flags dormant; }", "hooks"},
	} {
		b.nextRead = time.Now().Add(time.Hour)
		if out, err := runNft(test.edit); err != nil {
			t.Fatalf("%s: %v %s", test.edit, err, out)
		}
		if !heard(b, time.Minute) {
			t.Fatalf("%s is not heard", test.edit)
		}
		replace(t, b, s)
		if r := b.Repaired(); !r.Any() || !strings.HasPrefix(r.Found, test.first) {
			t.Errorf("%s: repaired %+v", test.edit, r)
		}
		same(t, "after "+test.edit, holds(t, b), want)
		replace(t, b, s)
		if r := b.Repaired(); r.Any() {
			t.Errorf("%s: repaired again: %+v", test.edit, r)
		}
	}
}

func TestOwnWritesAndOtherTablesAreNotHeard(t *testing.T) {
	enter(t)
	b := open(t)
	s := intent.State{Node: node(), Ports: shapes()["many"]}
	replace(t, b, s)
	run(t, "nft", "add", "table", "inet", "somebody")
	run(t, "nft", "add", "table", "ip", "spillway")
	refused := nft.NewTransaction(nft.Table{Family: unix.NFPROTO_INET, Name: "none"})
	refused.DeleteTable()
	if _, err := b.conn.Commit(t.Context(), refused); err == nil { // the next socket has another port
		t.Fatal("a table that is not there was deleted")
	}
	if err := b.Apply(t.Context(), intent.Changes{Upserts: shapes()["affinity"]}); err != nil {
		t.Fatal(err)
	}
	if heard(b, 300*time.Millisecond) {
		t.Error("heard of what it wrote itself, or of a table that is not ours")
	}
}

func TestATableOfThatNameWithOtherTypesIsMadeAnew(t *testing.T) {
	for _, planted := range []string{
		"chain inet spillway prerouting { type filter hook input priority 0; }",
		"chain inet spillway services4 { type nat hook prerouting priority 0; }",
		"set inet spillway services4 { type ipv4_addr; }",
		"map inet spillway services4-clients { type ipv4_addr : mark; }",
	} {
		enter(t)
		run(t, "nft", "add", "table", "inet", "spillway")
		run(t, "nft", "add "+planted)
		b := open(t)
		s := intent.State{Node: node(), Ports: shapes()["affinity"]}
		replace(t, b, s)
		same(t, "after "+planted, holds(t, b), fresh(t, s))
	}
}

func TestATableThatAnotherProgramOwnsIsOneClearLine(t *testing.T) {
	enter(t)
	var owner nft.Conn
	defer owner.Close()
	tx := nft.NewTransaction(nft.Table{Family: unix.NFPROTO_INET, Name: "spillway", Flags: nft.TableOwner})
	tx.AddTable()
	if _, err := owner.Commit(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	err := open(t).Replace(t.Context(), intent.State{Node: node()})
	if err == nil || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "belongs to another program") {
		t.Errorf("error %v", err)
	}
	owner.Close()
	b := open(t)
	replace(t, b, intent.State{Node: node()})
}
