package drops

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf/btf"
)

const (
	reasonPrefix    = "SKB_DROP_REASON_"
	netfilterDrop   = "NETFILTER_DROP"
	listenOverflow  = "TCP_LISTEN_OVERFLOW"
	listenSynthetic = 0x7ffffff1 // where the kernel has no such reason
	subsystemShift  = 16
)

// reasonTable holds the running kernel's names of drop reasons.
type reasonTable struct {
	names   map[uint32]string
	numbers map[string]uint32
}

// readReasons reads enum skb_drop_reason from the kernel's BTF.
func readReasons(spec *btf.Spec) (*reasonTable, error) {
	var enum *btf.Enum
	if err := spec.TypeByName("skb_drop_reason", &enum); err != nil {
		return nil, fmt.Errorf("%w: Linux 5.17 or later is needed", errNoReasons)
	}
	t := &reasonTable{names: map[uint32]string{}, numbers: map[string]uint32{}}
	for _, v := range enum.Values {
		name, number := strings.TrimPrefix(v.Name, reasonPrefix), uint32(v.Value)
		if name == "MAX" || name == "SUBSYS_MASK" {
			continue
		}
		t.names[number], t.numbers[name] = name, number
	}
	if _, known := t.numbers[listenOverflow]; !known {
		t.names[listenSynthetic], t.numbers[listenOverflow] = listenOverflow, listenSynthetic
	}
	return t, nil
}

// name is a reason's name, or its number and that of the subsystem it is of.
func (t *reasonTable) name(number uint32) string {
	if name, ok := t.names[number]; ok {
		return name
	}
	if sub := number >> subsystemShift; sub != 0 {
		return fmt.Sprintf("SUBSYSTEM_%d_%d", sub, number&(1<<subsystemShift-1))
	}
	return fmt.Sprintf("REASON_%d", number)
}

// filter converts Config.Reasons into the numbers that are included (only), or those that
// are excluded.
func (t *reasonTable) filter(c *Config) (list []uint32, only bool, err error) {
	for _, want := range c.Reasons {
		bare, not := strings.CutPrefix(want, "!")
		name := strings.TrimPrefix(strings.ToUpper(bare), reasonPrefix)
		number, known := t.numbers[name]
		if !known {
			return nil, false, &UnknownReasonError{Reason: bare, Near: t.near(name)}
		}
		list, only = append(list, number), !not
	}
	if only {
		return list, true, nil
	}
	quiet := []string{"SKB_NOT_DROPPED_YET", "SKB_CONSUMED"}
	if !c.All {
		quiet = append(quiet, Quiet...)
	}
	for _, name := range quiet {
		if number, known := t.numbers[name]; known {
			list = append(list, number)
		}
	}
	return list, false, nil
}

// near are the names that share a word with name, sorted.
func (t *reasonTable) near(name string) (list []string) {
	for known := range t.numbers {
		for word := range strings.SplitSeq(name, "_") {
			if len(word) > 2 && strings.Contains(known, word) {
				list = append(list, known)
				break
			}
		}
	}
	slices.Sort(list)
	return list
}

// UnknownReasonError reports that the running kernel has no such drop reason.
type UnknownReasonError struct {
	Reason string
	Near   []string // names that look like it, sorted
}

func (e *UnknownReasonError) Error() string {
	if len(e.Near) == 0 {
		return fmt.Sprintf("%s: this kernel has no such drop reason", e.Reason)
	}
	return fmt.Sprintf("%s: this kernel has no such drop reason; it has %s", e.Reason, strings.Join(e.Near[:min(len(e.Near), 12)], ", "))
}
