package nft

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// types lists the types of a transaction's messages, without repetitions.
func types(tx *Transaction) (out []int) {
	for _, m := range tx.messages() {
		out = append(out, int(m.Header.Type)&0xff)
	}
	return slices.Compact(out)
}

func TestChangesAreOrderedByKind(t *testing.T) {
	set, chain := &Set{Name: "s", Key: []Field{PortField}}, &Chain{Name: "c", Rules: []*Rule{(&Rule{}).Drop()}}
	element := maps.All(map[string]*Value{"\x00\x50\x00\x00": {}})
	tx := NewTransaction(Table{Family: unix.NFPROTO_INET, Name: "t"})
	tx.DeleteHelper("old")
	tx.DeleteSet("old")
	tx.Chains(map[string]string{"old": ""}, []*Chain{chain})
	tx.AddElements(set.Name, element)
	tx.DeleteElements("old", element)
	tx.AddHelper(Helper{Name: "tftp", Protocol: unix.IPPROTO_UDP})
	tx.AddSet(set)
	tx.AddTable()
	want := []int{
		unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_NEWSET, unix.NFT_MSG_NEWOBJ, unix.NFT_MSG_NEWCHAIN,
		unix.NFT_MSG_DELSETELEM, unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELRULE, unix.NFT_MSG_NEWRULE,
		unix.NFT_MSG_DELSET, unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELOBJ,
	}
	if got := types(tx); !slices.Equal(got, want) {
		t.Errorf("messages %v, want %v", got, want)
	}
}

func TestChainsWithEqualRulesStay(t *testing.T) {
	same, other := &Chain{Name: "same", Rules: []*Rule{(&Rule{}).Drop()}}, &Chain{Name: "other", Rules: []*Rule{(&Rule{Comment: "x"}).Drop()}}
	had := map[string]string{"same": same.Sums(), "other": same.Sums()}
	tx := NewTransaction(Table{Family: unix.NFPROTO_INET, Name: "t"})
	tx.Chains(had, []*Chain{same, other})
	if got, want := types(tx), []int{unix.NFT_MSG_DELRULE, unix.NFT_MSG_NEWRULE}; !slices.Equal(got, want) || tx.count != 2 {
		t.Errorf("messages %v, want %v", got, want)
	}
}

func TestPartsAreBoundedAndOnlyTheLastHasRules(t *testing.T) {
	tx := NewTransaction(Table{Family: unix.NFPROTO_INET, Name: "t"})
	tx.AddTable()
	tx.AddChain(&Chain{Name: "c", Rules: []*Rule{(&Rule{}).Drop()}})
	elements := map[string]*Value{}
	for i := range uint32(100_000) {
		elements[string(binary.BigEndian.AppendUint32(nil, i))] = &Value{Comment: fmt.Sprintf("element %d", i)}
	}
	tx.AddElements("s", maps.All(elements))
	parts := tx.Parts()
	if len(parts) < 2 {
		t.Fatalf("%d bytes in %d parts", tx.Size(), len(parts))
	}
	sent := 0
	for i, part := range parts {
		if part.size > 2*partSize {
			t.Errorf("part %d has %d bytes", i, part.size)
		}
		if rules := slices.Contains(types(part), unix.NFT_MSG_NEWRULE); rules != (i == len(parts)-1) {
			t.Errorf("part %d of %d has rules: %v", i, len(parts), rules)
		}
		sent += part.count
	}
	if sent != tx.count {
		t.Errorf("%d messages of %d", sent, tx.count)
	}
}
