package ruleset

import (
	"slices"
	"strconv"
	"strings"
)

// parseIptables parses a rule of iptables.
func (w *walker) parseIptables(r *Rule, m *match) {
	args, ok := r.arguments()
	if !ok {
		m.verdict, m.unclear = "other", "its text is cut off"
		return
	}
	not, module := false, ""
	for i := 0; i < len(args); i++ {
		value := ""
		if i+1 < len(args) {
			value = args[i+1]
		}
		switch args[i] {
		case "!":
			not = true
			continue
		case "--comment":
		case "-m":
			module = value
		case "--invert": // a reverse path filter: the eBPF programs know the source of each packet themselves
			if m.setUnclear("its match --invert is not understood"); w.outward != nil && module == "rpfilter" {
				m.never = true
			}
			not = false
			continue
		case "-j", "-g":
			w.targetOf(args[i], value, m)
			m.options(args[i+2:])
			return
		default:
			if apply, known := iptablesMatches[args[i]]; known {
				apply(w, m, iptablesArgument{module, value, not})
				break
			}
			m.setUnclear("its match " + args[i] + " is not understood")
			if strings.HasPrefix(value, "-") || value == "!" {
				not = false
				continue // an option without a value
			}
		}
		not = false
		i++
	}
}

// iptablesArgument is the value of an option that matches packets.
type iptablesArgument struct {
	module string // that -m has loaded last
	value  string
	not    bool // the option follows "!"
}

// iptablesMatches applies the options that match packets, with one value each.
var iptablesMatches = map[string]func(*walker, *match, iptablesArgument){
	"-s": func(w *walker, m *match, a iptablesArgument) {
		if set, ok := w.addresses(a.value); ok {
			m.source(set, a.not)
		} else {
			m.setUnclear("its address is not understood")
		}
	},
	"-d": func(w *walker, m *match, a iptablesArgument) {
		if set, ok := w.addresses(a.value); ok {
			m.dest(w, set, a.not)
		} else {
			m.setUnclear("its address is not understood")
		}
	},
	"-o": func(w *walker, m *match, a iptablesArgument) {
		if yes, known := w.isExternal(a.value); known {
			m.require(yes, a.not)
		} else {
			m.setUnclear("it depends on the output device")
		}
	},
	"-i": func(w *walker, m *match, a iptablesArgument) { // a pod's packet enters by no external device
		if w.entersElsewhere(a.value) {
			m.require(false, a.not)
		} else {
			m.setUnclear("it depends on the input device")
		}
	},
	"-p": func(w *walker, m *match, a iptablesArgument) {
		if w.outward != nil {
			m.protocol([]string{a.value}, a.not)
		} else {
			m.setUnclear("it depends on the protocol")
		}
	},
	"--icmp-type":   matchICMPType,
	"--icmpv6-type": matchICMPType,
	"--dst-type":    matchAddressType,
	"--src-type":    matchAddressType,
	"--ctstate":     matchState,
	"--state":       matchState,
	"--mark": func(w *walker, m *match, a iptablesArgument) {
		switch {
		case a.module != "mark":
			m.setUnclear("it depends on the connection's mark")
		case w.outward != nil:
			m.setUnclear("it depends on a mark")
		default:
			m.require(maskedIsZero(a.value), a.not)
		}
	},
}

func matchICMPType(w *walker, m *match, a iptablesArgument) {
	if w.outward != nil {
		m.icmpTypes([]string{a.value}, a.not)
	} else {
		m.setUnclear("it depends on the type of ICMP")
	}
}

// matchAddressType: the addresses are neither of the node nor of a group.
func matchAddressType(_ *walker, m *match, a iptablesArgument) {
	m.require(a.value == "UNICAST", a.not)
}

func matchState(w *walker, m *match, a iptablesArgument) {
	if w.outward != nil {
		m.states(words(strings.ToLower(a.value)), a.not)
	} else {
		m.require(slices.Contains(strings.Split(a.value, ","), "NEW"), a.not)
	}
}

// maskedIsZero reports whether a mark of zero matches VALUE or VALUE/MASK.
func maskedIsZero(text string) bool {
	value, _, _ := strings.Cut(text, "/")
	n, err := strconv.ParseUint(value, 0, 32)
	return err == nil && n == 0
}

// targetOf sets the verdict of a target.
func (w *walker) targetOf(option, name string, m *match) {
	m.target = name
	switch name {
	case "RETURN":
		m.verdict = "return"
	case "ACCEPT":
		m.verdict = "accept"
	case "MASQUERADE":
		m.verdict = "masquerade"
	case "LOG", "NFLOG", "TRACE", "AUDIT":
	case "SNAT", "NETMAP", "DNAT", "REDIRECT", "DROP", "REJECT", "MARK", "CONNMARK", "SET", "CT", "NFQUEUE", "QUEUE":
		m.verdict = "other"
	default:
		m.verdict = "jump"
		if option == "-g" {
			m.verdict = "goto"
		}
	}
}

// options reads the options of a target.
func (m *match) options(args []string) {
	if m.verdict == "masquerade" && slices.Contains(args, "--to-ports") {
		m.setUnclear("it gives ports of a range")
	}
}
