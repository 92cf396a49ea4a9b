package doctor

import (
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/node/ruleset"
)

// helperMissing reports translated ports whose protocol needs a conntrack helper, where
// no rule assigns it.
type helperMissing struct{}

func (helperMissing) Name() string  { return "conntrack helpers" }
func (helperMissing) About() string { return "TFTP (UDP 69) and FTP (TCP 21) behind NAT rules" }

var helperProtocols = []struct {
	helper, protocol, packets string
	port                      int
}{
	{"tftp", "udp", "Every transfer times out: the server sends the data from another port, which belongs to no connection and is not " +
		"translated back.", 69},
	{"ftp", "tcp", "Login works, but every listing and transfer hangs: the server announces its own address in PASV, which external " +
		"clients cannot reach.", 21},
}

func (helperMissing) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		for _, h := range helperProtocols {
			var missing []ruleset.Frontend
			for _, f := range ns.Rules.Frontends(h.protocol, h.port) {
				if !(ns.AutoHelper && f.Port == h.port) && !ns.Rules.Assigned(h.helper, f.Port) {
					missing = append(missing, f)
				}
			}
			if len(missing) == 0 {
				continue
			}
			f := Finding{
				ID: "helper-missing", Severity: Critical, Namespace: ns.Namespace.String(), Object: nodeObject(h.helper),
				Title:   fmt.Sprintf("%s transfers fail: its ports are translated without the conntrack helper", strings.ToUpper(h.helper)),
				Numbers: map[string]float64{"port": float64(h.port), "frontends": float64(len(missing))},
				Packets: h.packets,
				Remedy: "Assign the helper to connections to these ports; the kernel no longer does this automatically since Linux 6.0. A " +
					"restart of the machine removes the rules: add them to your firewall's configuration.",
			}
			for _, m := range missing {
				f.Evidence = append(f.Evidence, fmt.Sprintf("%s translates %s port %d to an endpoint's port %d", m.Command, h.protocol, m.Port, h.port))
				f.Commands = append(f.Commands, assign(h.helper, h.protocol, m)...)
			}
			f.Evidence = append(f.Evidence, "no rule assigns the helper "+h.helper+" to them")
			f.Commands = slices.Compact(f.Commands)
			for j := range f.Commands {
				f.Commands[j] = ns.Namespace.EnterCommand() + f.Commands[j]
			}
			out = append(out, f)
		}
	}
	return out
}

// assign returns the commands that assign a helper to connections to a frontend, in
// the language of the rules that translate it.
func assign(helper, protocol string, f ruleset.Frontend) []string {
	if f.Command != "nft" {
		var out []string
		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			out = append(out, fmt.Sprintf("%s -t raw -A %s -p %s --dport %d -j CT --helper %s", f.Command, chain, protocol, f.Port, helper))
		}
		return out
	}
	// After conntrack (-200) and before DNAT (-100).
	const table = "inet conntrack-helpers"
	out := []string{fmt.Sprintf(`nft 'add table %[1]s; add ct helper %[1]s %[2]s { type "%[2]s" protocol %[3]s; }'`, table, helper, protocol)}
	for _, hook := range []string{"prerouting", "output"} {
		out = append(out, fmt.Sprintf(`nft 'add chain %[1]s %[2]s { type filter hook %[2]s priority -150; }; add rule %[1]s %[2]s %[3]s dport %[4]d ct helper set "%[5]s"'`, table, hook, protocol, f.Port, helper))
	}
	return out
}
