package nodeclient

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// Address is an address and port of a packet. Protocol is as conntrack writes it: "tcp".
type Address struct {
	Protocol string
	AddrPort netip.AddrPort
}

// Owner is what an agent knows about an address; zero: nothing. The keys are an interface for
// programs.
type Owner struct {
	// Service is the Service port that is served there, as namespace/name:port.
	Service string `json:"service,omitempty"`
	// EndpointOf are the Service ports that have it as an endpoint.
	EndpointOf []string `json:"endpointOf,omitempty"`
	Pod        string   `json:"pod,omitempty"` // namespace/name
	Node       string   `json:"node,omitempty"`
}

// IsZero reports whether nothing is known.
func (o *Owner) IsZero() bool {
	return o.Service == "" && len(o.EndpointOf) == 0 && o.Pod == "" && o.Node == ""
}

// Services returns the Service ports to which a packet from or to the address belongs.
func (o *Owner) Services() []string {
	if o.Service != "" {
		return []string{o.Service}
	}
	return o.EndpointOf
}

// String returns the owner for people, such as "pod shop/web-1 on n2 (endpoint of
// shop/web:http)"; "" if nothing is known.
func (o *Owner) String() string {
	if o.Service != "" {
		return "Service " + o.Service
	}
	text := ""
	switch {
	case o.Pod != "":
		text = "pod " + o.Pod
		if o.Node != "" {
			text += " on " + o.Node
		}
	case o.Node != "":
		text = "on " + o.Node
	}
	if len(o.EndpointOf) == 0 {
		return text
	}
	of := "endpoint of " + strings.Join(o.EndpointOf, ", ")
	if text == "" {
		return of
	}
	return text + " (" + of + ")"
}

const (
	namesAtOnce  = 512 // addresses in a request, as many as an agent allows
	namesTimeout = time.Second
	namesFresh   = 10 * time.Second // an address may get another owner
	namesPause   = 5 * time.Second  // after an agent did not answer
	namesMost    = 16_384           // remembered owners
)

// Names asks an agent for the owners of addresses, and remembers its answers for a while. One
// goroutine at a time uses it.
type Names struct {
	agent    Dialer
	client   nodev1alpha1connect.NodeServiceClient
	known    map[Address]cachedOwner
	failedAt time.Time // when the agent last did not answer
	err      error     // of that request
}

type cachedOwner struct {
	Owner
	at time.Time
}

// NewNames returns Names of an agent.
func NewNames(agent Dialer) *Names {
	return &Names{agent: agent, client: New(agent), known: map[Address]cachedOwner{}}
}

// Of returns the owners of addresses, in their order. If the agent does not answer, it returns
// the remembered owners with an error of one line, and does not ask again for some seconds.
func (n *Names) Of(ctx context.Context, addrs []Address) ([]Owner, error) {
	n.learn(ctx, addrs)
	out := make([]Owner, len(addrs))
	for i, a := range addrs {
		out[i] = n.known[a].Owner
	}
	return out, n.err
}

// Probe returns the error of an agent that does not name addresses; nil if it does. It does not
// ask again for some seconds after an error.
func (n *Names) Probe(ctx context.Context) error {
	if n.err == nil || time.Since(n.failedAt) > namesPause {
		n.ask(ctx, nil)
	}
	return n.err
}

func (n *Names) learn(ctx context.Context, addrs []Address) {
	now := time.Now()
	if n.err != nil && now.Sub(n.failedAt) < namesPause {
		return
	}
	var unknown []Address
	seen := map[Address]bool{}
	for _, a := range addrs {
		if last, ok := n.known[a]; a.AddrPort.IsValid() && !seen[a] && (!ok || now.Sub(last.at) > namesFresh) {
			seen[a], unknown = true, append(unknown, a)
		}
	}
	if len(n.known)+len(unknown) > namesMost {
		clear(n.known)
		unknown = slices.DeleteFunc(slices.Clone(addrs), func(a Address) bool { return !a.AddrPort.IsValid() })
	}
	for part := range slices.Chunk(unknown, namesAtOnce) {
		if n.ask(ctx, part); n.err != nil {
			return
		}
	}
}

// ask asks for the owners of some addresses, and sets err.
func (n *Names) ask(ctx context.Context, addrs []Address) {
	ctx, cancel := context.WithTimeout(ctx, namesTimeout)
	defer cancel()
	req := &nodev1alpha1.NamesRequest{}
	for _, a := range addrs {
		req.Addresses = append(req.Addresses, &nodev1alpha1.Address{
			Protocol: nodev1alpha1.Protocol(nodev1alpha1.Protocol_value["PROTOCOL_"+strings.ToUpper(a.Protocol)]),
			Address:  a.AddrPort.Addr().Unmap().WithZone("").String(), Port: uint32(a.AddrPort.Port()),
		})
	}
	resp, err := n.client.Names(ctx, req)
	now := time.Now()
	if err == nil && len(resp.Names) != len(addrs) {
		err = fmt.Errorf("it names %d of %d addresses", len(resp.Names), len(addrs))
	}
	if n.err = Error("name Services, which needs the agent", n.agent, err); n.err != nil {
		n.failedAt = now
		return
	}
	for i, a := range addrs {
		n.known[a] = cachedOwner{owner(resp.Names[i]), now}
	}
}

func owner(a *nodev1alpha1.AddressNames) Owner {
	out := Owner{Service: portName(a.Service), Pod: a.Pod, Node: a.Node}
	for _, p := range a.EndpointOf {
		// A Service of both families has two ports of one name.
		if name := portName(p); !slices.Contains(out.EndpointOf, name) {
			out.EndpointOf = append(out.EndpointOf, name)
		}
	}
	return out
}

// portName is such as "shop/web:http"; "" for no port.
func portName(p *nodev1alpha1.ServicePortName) string {
	if p == nil {
		return ""
	}
	port := p.PortName
	if port == "" {
		port = fmt.Sprint(p.Port)
	}
	return p.Namespace + "/" + p.Name + ":" + port
}
