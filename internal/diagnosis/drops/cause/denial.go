// Package cause names the object of Spillway that dropped a packet.
package cause

import (
	"net/netip"
	"strings"

	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// ExplainDenial sets the cause of a drop by nft, if a DoNotTrackPolicy denied the
// packet. It reads the current table of policies in the namespace of the drop. On a
// kernel that does not report which table dropped the packet, the cause also names
// the chains that see packets before that table.
func ExplainDenial(follower *drops.Follower, d *drops.Drop) {
	if d.By != "nft" || d.Table != "" && d.Table != nftables.PolicyTable || d.Fragment {
		return
	}
	enter := func(do func() error) error { return follower.Enter(d, do) }
	found, err := nftables.Denied(enter, nftables.Dropped{
		Source:       netip.AddrPortFrom(d.Source, d.SourcePort),
		Destination:  netip.AddrPortFrom(d.Destination, d.DestinationPort),
		Protocol:     protocolNamed(d.Protocol),
		Hook:         d.Hook,
		FromThisNode: d.Interface == "" || d.Interface == "lo",
	})
	if err == nil { // else the drop keeps its cause
		setDenial(d, found)
	}
}

// setDenial writes a denial into a drop.
func setDenial(d *drops.Drop, found nftables.Denial) {
	by := "DoNotTrackPolicy " + found.Policy + " (deny: others) "
	switch tableKnown := d.Table != ""; {
	case found.Policy == "" && tableKnown:
		d.Meaning = "a DoNotTrackPolicy (deny: others) denied it, and none does any more: it is not known which"
	case found.Policy == "":
	case tableKnown || len(found.Before) == 0:
		d.Table, d.Chain = nftables.PolicyTable, found.Chain
		d.Meaning = by + "denied it"
	default:
		d.Meaning = by + "denies it, if it was not dropped before by a rule reached from nft chain " + strings.Join(found.Before, " or ")
	}
}

func protocolNamed(name string) model.Protocol {
	for _, p := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		if conntrack.ProtocolName(uint8(p)) == name {
			return p
		}
	}
	return 0
}
