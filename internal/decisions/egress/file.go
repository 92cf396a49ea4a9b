package egress

import (
	"net/netip"
	"slices"
)

// File is the file of ip-masq-agent (kubernetes-sigs/ip-masq-agent, README): which destinations keep the
// pod's address.
type File struct {
	NonMasqueradeCIDRs []netip.Prefix `json:"nonMasqueradeCIDRs"`
	MasqLinkLocal      bool           `json:"masqLinkLocal"`
	MasqLinkLocalIPv6  bool           `json:"masqLinkLocalIPv6"`
	ResyncInterval     string         `json:"resyncInterval"` // ignored: a changed file is read at once
}

// Link-local addresses, among them the clouds' metadata servers.
var linkLocal = map[bool]netip.Prefix{false: netip.MustParsePrefix("169.254.0.0/16"), true: netip.MustParsePrefix("fe80::/10")}

// masquerade returns what a family's packets do by the file, or, if it is nil, by the ranges of the cluster's
// pods. The MasqueradeRange has no source for a family that is not concerned; why says what is missing.
func (f *File) masquerade(v6 bool, n Node) (w MasqueradeRange, why string) {
	keep, masqLinkLocal := n.ClusterCIDRs, false
	if f != nil {
		keep, masqLinkLocal = f.NonMasqueradeCIDRs, f.MasqLinkLocal
		if v6 {
			masqLinkLocal = f.MasqLinkLocalIPv6
		}
	}
	if f == nil && len(keep) == 0 {
		if v6 {
			return MasqueradeRange{}, ""
		}
		return MasqueradeRange{}, "leaves all to netfilter: no range of the cluster's pods is known: give --egress-config or --cluster-cidr"
	}
	ofFamily := func(p netip.Prefix) bool { return p.Addr().Is6() == v6 }
	if !slices.ContainsFunc(keep, ofFamily) && (v6 || f == nil) {
		return MasqueradeRange{}, ""
	}
	w.Sources = []netip.Prefix{everything(v6)}
	kept := slices.DeleteFunc(slices.Clone(keep), func(p netip.Prefix) bool { return !ofFamily(p) })
	if !masqLinkLocal {
		kept = append(kept, linkLocal[v6])
	}
	w.Outside = without(v6, kept)
	return w, ""
}
