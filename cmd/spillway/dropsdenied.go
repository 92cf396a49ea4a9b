package main

import (
	"net/netip"
	"strings"

	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// explainDenial says of a packet that nft dropped which DoNotTrackPolicy denied it, if
// one did: the table of policies is looked at in the namespace of the drop, as it is by
// now. Where the kernel does not tell which table dropped, chains that see packets
// before it does are named too.
func explainDenial(follower *drops.Follower, d *drops.Drop) {
	if d.By != "nft" || d.Table != "" && d.Table != nftables.PolicyTable || d.Fragment {
		return
	}
	enter := func(do func() error) error { return follower.Enter(d, do) }
	found, err := nftables.Denied(enter, nftables.Dropped{
		Source:      netip.AddrPortFrom(d.Source, d.SourcePort),
		Destination: netip.AddrPortFrom(d.Destination, d.DestinationPort),
		Protocol:    protocolNamed(d.Protocol),
		Hook:        d.Hook,
		FromHere:    d.Interface == "" || d.Interface == "lo",
	})
	if err == nil { // else what is known of it stands
		tellDenial(d, found)
	}
}

// tellDenial writes what was found into a drop.
func tellDenial(d *drops.Drop, found nftables.Denial) {
	by := "DoNotTrackPolicy " + found.Policy + " (deny: others) "
	switch told := d.Table != ""; {
	case found.Policy == "" && told:
		d.Meaning = "a DoNotTrackPolicy (deny: others) denied it, and none does any more: it is not known which"
	case found.Policy == "":
	case told || len(found.Before) == 0:
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
