package drops

import (
	"context"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/diagnosis/drops/cause"
)

// names are what an agent knows about the ends of a packet. The keys are an interface.
type names struct {
	// Services are the Service ports to which the packet belonged, as namespace/name:port.
	Services    []string          `json:"services,omitempty"`
	Source      *nodeclient.Owner `json:"sourceName,omitempty"`
	Destination *nodeclient.Owner `json:"destinationName,omitempty"`
}

// namesOf returns the names of a packet's ends; zero if the agent does not answer.
func namesOf(ctx context.Context, agent *nodeclient.Names, p *drops.Packet) (n names) {
	// Without an answer there is nothing to add: Probe reported it.
	owners, _ := agent.Of(ctx, []nodeclient.Address{
		{Protocol: p.Protocol, AddrPort: netip.AddrPortFrom(p.Source, p.SourcePort)},
		{Protocol: p.Protocol, AddrPort: netip.AddrPortFrom(p.Destination, p.DestinationPort)},
	})
	for i, end := range []**nodeclient.Owner{&n.Source, &n.Destination} {
		if owners[i].IsZero() {
			continue
		}
		*end = &owners[i]
		for _, service := range owners[i].Services() {
			if !slices.Contains(n.Services, service) {
				n.Services = append(n.Services, service)
			}
		}
	}
	return n
}

// text is such as "from pod shop/client on n1 to Service shop/web:http"; "" without names.
func (n *names) text() string {
	text := ""
	if n.Source != nil {
		text = "from " + n.Source.String()
	}
	if n.Destination != nil {
		if text != "" {
			text += " "
		}
		text += "to " + n.Destination.String()
	}
	return text
}

// explainer adds to drops what Spillway knows.
type explainer struct {
	verdicts *cause.Verdicts
	follower *drops.Follower
	names    *nodeclient.Names
}

func (e explainer) drop(ctx context.Context, d *drops.Drop) dropResult {
	e.verdicts.Explain(d)
	cause.ExplainDenial(e.follower, d)
	return dropResult{Drop: d, names: namesOf(ctx, e.names, &d.Packet)}
}
