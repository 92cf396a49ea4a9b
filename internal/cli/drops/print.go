package drops

import (
	"fmt"
	"io"
	"net/netip"

	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// dropCause is what a drop's second line says of its cause.
type dropCause struct{ reason, by, hook, table, chain string }

// explained has the meaning that was printed last for each cause.
type explained map[dropCause]string

// isNew reports whether the drop's meaning is not the last one of its cause, and notes it.
func (e explained) isNew(d *drops.Drop) bool {
	of := dropCause{d.Reason, d.By, d.Hook, d.Table, d.Chain}
	last, known := e[of]
	e[of] = d.Meaning
	return !known || last != d.Meaning
}

// dropResult is a drop with a text form.
type dropResult struct {
	*drops.Drop
	names
	explained explained
}

// Write prints the packet, its names as far as an agent knows them, the hop, and the meaning,
// each in a line. It leaves out a meaning
// that the last drop of the same cause had. On a terminal, long lines are broken.
func (d dropResult) Write(w io.Writer) error {
	p := page.Of(w)
	lines := d.Time.Format("15:04:05.000") + " " + packetText(&d.Packet) + "\n"
	var texts []string
	if text := d.text(); text != "" {
		texts = append(texts, text)
	}
	texts = append(texts, hopText(d.Drop))
	if d.explained.isNew(d.Drop) {
		texts = append(texts, d.Meaning)
	}
	for _, text := range texts {
		text = escape.Text(text)
		if p.Width > 0 && !p.Wide {
			lines += p.Wrap(text, "  ") + "\n"
		} else {
			lines += "  " + text + "\n"
		}
	}
	if _, err := io.WriteString(p, lines); err != nil {
		return fmt.Errorf("write drop: %w", err)
	}
	return nil
}

// packetText is such as "tcp S 10.0.0.9:40000 > 10.96.0.10:80, 60 bytes".
func packetText(p *drops.Packet) string {
	end := func(a netip.Addr, port uint16) string {
		if port == 0 {
			return a.String()
		}
		return netip.AddrPortFrom(a, port).String()
	}
	text := p.Protocol
	for _, more := range []string{p.TCPFlags, p.ICMP} {
		if more != "" {
			text += " " + more
		}
	}
	if p.Fragment {
		text += " (fragment)"
	}
	return fmt.Sprintf("%s %s > %s, %d bytes", text, end(p.Source, p.SourcePort), end(p.Destination, p.DestinationPort), p.Length)
}

// hopText is such as "NETFILTER_DROP in pod web (nginx[812]) from eth0 at INPUT,
// nft filter/input, nf_hook_slow+0xb1".
func hopText(d *drops.Drop) string {
	text := d.Reason + " in " + d.Namespace
	if d.Pod != "" {
		text = d.Reason + " in pod " + d.Pod + " (" + d.Namespace + ")"
	}
	if d.Interface != "" {
		text += " from " + d.Interface
	}
	if d.Out != "" {
		text += " to " + d.Out
	}
	if d.Hook != "" {
		text += " at " + d.Hook
	}
	if d.By != "" {
		text += ", " + d.By
		if d.Table != "" {
			text += " " + d.Table
		}
		if d.Chain != "" {
			text += "/" + d.Chain
		}
	}
	if d.Location != "" {
		text += ", " + d.Location
	}
	return text
}
