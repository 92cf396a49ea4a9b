package doctor

import (
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/diagnosis/doctor/ruleset"
)

// helperCheck looks for translated ports whose protocol needs a helper that
// nobody assigns.
type helperCheck struct{}

func (helperCheck) Name() string  { return "conntrack helpers" }
func (helperCheck) About() string { return "TFTP (UDP 69) and FTP (TCP 21) behind NAT rules" }

var helped = []struct {
	helper, protocol, packets string
	port                      int
}{
	{"tftp", "udp", "The server sends the data from another port, which belongs to no connection: it is not translated back, and every transfer times out.", 69},
	{"ftp", "tcp", "The address that the server names in PASV is its own, which clients outside cannot reach: logging in works, every listing and transfer hangs.", 21},
}

func (helperCheck) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		for _, h := range helped {
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
				ID: "helper-missing", Severity: Critical, Namespace: ns.Namespace.String(),
				Title:   fmt.Sprintf("%s is translated without its conntrack helper", strings.ToUpper(h.helper)),
				Numbers: map[string]float64{"port": float64(h.port), "frontends": float64(len(missing))},
				Packets: h.packets,
				Mend:    "Assign the helper to connections to these ports; the kernel has not done so by itself since Linux 6.0. The rules are lost with a restart of the machine: keep them where your firewall's are.",
			}
			for _, m := range missing {
				f.Evidence = append(f.Evidence, fmt.Sprintf("%s leads %s port %d to an endpoint's port %d", m.Command, h.protocol, m.Port, h.port))
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

// assign are the commands that give a helper to connections to a frontend, in
// the language of the rules that translate it.
func assign(helper, protocol string, f ruleset.Frontend) []string {
	if f.Command != "nft" {
		var out []string
		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			out = append(out, fmt.Sprintf("%s -t raw -A %s -p %s --dport %d -j CT --helper %s", f.Command, chain, protocol, f.Port, helper))
		}
		return out
	}
	// Behind conntrack (-200), before the destination is translated (-100).
	const table = "inet conntrack-helpers"
	out := []string{fmt.Sprintf(`nft 'add table %[1]s; add ct helper %[1]s %[2]s { type "%[2]s" protocol %[3]s; }'`, table, helper, protocol)}
	for _, hook := range []string{"prerouting", "output"} {
		out = append(out, fmt.Sprintf(`nft 'add chain %[1]s %[2]s { type filter hook %[2]s priority -150; }; add rule %[1]s %[2]s %[3]s dport %[4]d ct helper set "%[5]s"'`, table, hook, protocol, f.Port, helper))
	}
	return out
}
