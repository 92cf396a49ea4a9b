package drops

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"

	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/escape"
)

// printDrop prints one drop. In a table it has three lines: the packet, the hop, and the
// meaning.
func printDrop(w io.Writer, output string, d *drops.Drop) error {
	if output == "json" {
		return json.NewEncoder(w).Encode(d)
	}
	_, err := fmt.Fprintf(w, "%s %s\n  %s\n  %s\n", d.Time.Format("15:04:05.000"), packetText(&d.Packet), escape.Text(hopText(d)), escape.Text(d.Meaning))
	return err
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
