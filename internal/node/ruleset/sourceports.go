package ruleset

import (
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"spillway.dev/spillway/internal/escape"
)

// PortRange is a range of ports with both its ends.
type PortRange struct{ First, Last uint16 }

// AllPorts are the ports of a source NAT rule that names none, for clients with a port
// from 1024 on (nf_nat_l4proto_unique_tuple).
var AllPorts = PortRange{1024, 65535}

// Size returns the number of ports.
func (p PortRange) Size() int { return int(p.Last) - int(p.First) + 1 }

// Contains reports whether the port is in the range.
func (p PortRange) Contains(port uint16) bool { return p.First <= port && port <= p.Last }

func (p PortRange) String() string {
	return strconv.Itoa(int(p.First)) + "-" + strconv.Itoa(int(p.Last))
}

// Options with the ports of a source NAT rule. The first group is removed to use all ports.
var (
	iptablesPorts = regexp.MustCompile(`(?:--to-source (?:\[[^\]]*\](?:-\[[^\]]*\])?|[0-9.-]+)(:(\d+)(?:-(\d+))?)| (--to-ports (\d+)(?:-(\d+))?))(?: |$)`)
	nftPorts      = regexp.MustCompile(`(?:snat(?: ip6?)? to (?:\[[^\]]*\]|[0-9.-]+)(:(\d+)(?:-(\d+))?)|masquerade (to :(\d+)(?:-(\d+))?))(?: |$)`)
)

// findPorts returns where the text of a rule names the ports of its source NAT, and the
// ports. The places are those of regexp's submatches; nil without ports.
func (r *Rule) findPorts(text string) (place []int, ports PortRange) {
	pattern := nftPorts
	if r.Command != "nft" {
		pattern = iptablesPorts
	}
	m := pattern.FindStringSubmatchIndex(text)
	if m == nil {
		return nil, AllPorts
	}
	group := 2 // of the address's ports
	if m[group] < 0 {
		group = 8
	}
	number := func(i int) (uint16, bool) {
		if m[i] < 0 {
			return 0, false
		}
		n, err := strconv.ParseUint(text[m[i]:m[i+1]], 10, 16)
		return uint16(n), err == nil
	}
	first, ok := number(group + 2)
	if !ok {
		return nil, AllPorts
	}
	last, ok := number(group + 4)
	if !ok {
		last = first
	}
	return m[group : group+2], PortRange{min(first, last), max(first, last)}
}

// SourcePorts returns the ports that a source NAT rule chooses from. ok is false for other
// rules.
func (r *Rule) SourcePorts() (ports PortRange, ok bool) {
	translates, _ := r.SourceNAT()
	if !translates || r.Element() {
		return PortRange{}, false
	}
	_, ports = r.findPorts(r.withoutComment())
	return ports, true
}

// OfFamily reports whether packets of the address's family traverse the rule.
func (r *Rule) OfFamily(a netip.Addr) bool {
	return r.Family == "inet" || (r.Family == "ip6") == a.Is6()
}

// MakeAllPorts returns the shell command that replaces the rule by the same rule without
// its range of ports; "" for a rule that has none, or has names that the tools do not
// accept.
func (r *Rule) MakeAllPorts() string {
	if place, _ := r.findPorts(r.withoutComment()); place == nil {
		return ""
	}
	if r.Command != "nft" {
		args, ok := r.arguments()
		if !ok {
			return ""
		}
		if i := slices.Index(args, "--to-ports"); i >= 0 && i+1 < len(args) {
			return r.replaceArguments(slices.Delete(args, i, i+2))
		}
		if i := slices.Index(args, "--to-source"); i >= 0 && i+1 < len(args) {
			if end := strings.LastIndex(args[i+1], ":"); end > 0 {
				args[i+1] = args[i+1][:end]
				return r.replaceArguments(args)
			}
		}
		return ""
	}
	return r.replaceText(func(text string) string {
		place, _ := r.findPorts(text)
		if place == nil { // the ports are behind the comment, as nft lists no rule
			return text
		}
		return strings.TrimSpace(strings.ReplaceAll(text[:place[0]]+text[place[1]:], "  ", " "))
	})
}

// replaceArguments returns the command that replaces a rule of iptables.
func (r *Rule) replaceArguments(args []string) string {
	line := []string{r.Command, "-t", escape.Shell(r.Table), "-R", escape.Shell(r.Chain), strconv.Itoa(r.Place)}
	for _, arg := range args {
		line = append(line, escape.Shell(arg))
	}
	return strings.Join(line, " ")
}

// replaceText returns the command that replaces a rule of nft; change gets its text without
// the comment. It returns "" for a rule with names that nft does not accept.
func (r *Rule) replaceText(change func(text string) string) string {
	// nft parses its arguments as a script: a word that is not a name could be a command.
	if !identifier.MatchString(r.Table) || !identifier.MatchString(r.Chain) || strings.ContainsAny(r.withoutComment(), ";#") {
		return ""
	}
	text, comment := r.Text, ""
	if loc := quoted.FindStringIndex(text); loc != nil {
		text, comment = strings.TrimSpace(text[:loc[0]]), " "+text[loc[0]:]
	}
	return "nft replace rule " + r.Family + " " + r.Table + " " + r.Chain + " handle " + strconv.Itoa(r.Place) + " " +
		escape.Shell(change(text)+comment)
}
