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
		case "-s", "-d":
			set, ok := w.addresses(value)
			switch {
			case !ok:
				m.setUnclear("its address is not understood")
			case args[i] == "-s":
				m.source(set, not)
			default:
				m.dest(w, set, not)
			}
		case "-o":
			if yes, known := w.isExternal(value); known {
				m.require(yes, not)
			} else {
				m.setUnclear("it depends on the output device")
			}
		case "-i": // a pod's packet enters by no external device
			if w.entersElsewhere(value) {
				m.require(false, not)
			} else {
				m.setUnclear("it depends on the input device")
			}
		case "-p":
			if w.outward != nil {
				m.protocol([]string{value}, not)
			} else {
				m.setUnclear("it depends on the protocol")
			}
		case "--icmp-type", "--icmpv6-type":
			if w.outward != nil {
				m.icmpTypes([]string{value}, not)
			} else {
				m.setUnclear("it depends on the type of ICMP")
			}
		case "-m":
			module = value
		case "--comment":
		case "--invert": // a reverse path filter: the eBPF programs know the source of each packet themselves
			if m.setUnclear("its match --invert is not understood"); w.outward != nil && module == "rpfilter" {
				m.never = true
			}
			not = false
			continue
		case "--dst-type", "--src-type": // of the node, or a group
			m.require(value == "UNICAST", not)
		case "--mark":
			switch {
			case module != "mark":
				m.setUnclear("it depends on the connection's mark")
			case w.outward != nil:
				m.setUnclear("it depends on a mark")
			default:
				m.require(maskedIsZero(value), not)
			}
		case "--ctstate", "--state":
			if w.outward != nil {
				m.states(words(strings.ToLower(value)), not)
			} else {
				m.require(slices.Contains(strings.Split(value, ","), "NEW"), not)
			}
		case "-j", "-g":
			w.targetOf(args[i], value, m)
			m.options(args[i+2:])
			return
		default:
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
