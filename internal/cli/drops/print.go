package drops

import (
	"fmt"
	"io"
	"net/netip"

	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// dropResult is a drop with a text form.
type dropResult struct{ *drops.Drop }

// Write prints three lines: the packet, the hop, and the meaning. On a terminal, long ones
// are broken.
func (d dropResult) Write(w io.Writer) error {
	p := page.Of(w)
	lines := d.Time.Format("15:04:05.000") + " " + packetText(&d.Packet) + "\n"
	for _, text := range []string{hopText(d.Drop), d.Meaning} {
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
