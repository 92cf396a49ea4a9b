package cause

import (
	"testing"

	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/diagnosis/drops"
)

// TestADenialIsToldAsFarAsItIsKnown tests kernels that name the table, and kernels that
// do not.
func TestADenialIsToldAsFarAsItIsKnown(t *testing.T) {
	denies := nftables.Denial{Policy: "cache", Chain: "prerouting"}
	behind := denies
	behind.Before = []string{"raw/PREROUTING", "theirs/pre"}
	for _, row := range []struct {
		table, want string
		found       nftables.Denial
	}{
		{"", "a rule", nftables.Denial{}},
		{"", "DoNotTrackPolicy cache (deny: others) denied it", denies},
		{"", "DoNotTrackPolicy cache (deny: others) denies it, if it was not dropped before by a rule reached from nft chain raw/PREROUTING " +
			"or theirs/pre", behind},
		{nftables.PolicyTable, "DoNotTrackPolicy cache (deny: others) denied it", behind},
		{nftables.PolicyTable, "a DoNotTrackPolicy (deny: others) denied it, and none does any more: it is not known which", nftables.Denial{}},
	} {
		d := drops.Drop{Meaning: "a rule", Place: drops.Place{Table: row.table}}
		if setDenial(&d, row.found); d.Meaning != row.want {
			t.Errorf("%+v: %s", row, d.Meaning)
		}
	}
}
