// Package trace explains what happens to a new connection on this node: the decision of the
// dataplane, step by step with the entries it was made from, and then one real connection
// and where it got to.
//
//	Trace ──> ebpf.DryRun    the programs decide, on copies of the maps that they write
//	      ──> ebpf.View      what the maps hold at each step
//	      ──> child          one real connection, in the client's namespaces
//	      ──> drops.Follow   where the kernel dropped it
//
// The decision is never computed a second time in Go: a step that decides is the one whose
// counter grew.
package trace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netns"

	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// Config describes a new connection.
type Config struct {
	BPFFS    string // directory of the agent's pins
	From     Peer
	To       Peer
	Port     uint16
	Protocol model.Protocol // TCP or UDP
	// SourcePort is the client's port, 0 for a free one.
	SourcePort uint16
	// Connect opens one real connection, from a client of this node.
	Connect bool
	Timeout time.Duration // of the probe
}

// Peer is an address with the name that the user gave.
type Peer struct {
	Name string
	Addr netip.Addr
}

// String is "shop/web-0 (10.244.0.5)", or the address.
func (p Peer) String() string {
	if p.Name == "" || p.Name == p.Addr.String() {
		return p.Addr.String()
	}
	return fmt.Sprintf("%s (%s)", p.Name, p.Addr)
}

// State says what a step means for the connection.
type State string

// The states of a step.
const (
	Passed  State = "passed"  // the next step follows
	Decided State = "decided" // the connection goes on from here; the last step
	Refused State = "refused" // dropped or rejected here; the last step
	Doubt   State = "doubt"   // passed, but the step may explain a fault
)

// Step is one step of the decision.
type Step struct {
	Name    string `json:"name"`
	Lookup  string `json:"lookup,omitempty"` // the map and the key
	Found   string `json:"found"`
	Follows string `json:"follows,omitempty"`
	State   State  `json:"state"`
}

// Report is the answer.
type Report struct {
	Service         string `json:"service,omitempty"` // namespace/name:port that is served at the destination
	Source          string `json:"from"`
	Destination     string `json:"to"`
	DestinationPort uint16 `json:"port"`
	ProtocolName    string `json:"protocol"`
	ClientPort      uint16 `json:"sourcePort"`
	Client          string `json:"client"` // pod, node or outside
	Dataplane       string `json:"dataplane"`
	// Decision is the outcome in one line, and Refused whether it ends the connection.
	Decision string `json:"decision"`
	Refused  bool   `json:"refused"`
	// Verdicts are the counters that the dry runs increased.
	Verdicts []string                `json:"verdicts,omitempty"`
	Endpoint string                  `json:"endpoint,omitempty"`
	Steps    []Step                  `json:"steps"`
	Sets     []inspect.EndpointShare `json:"endpoints,omitempty"`
	Probe    *Probe                  `json:"probe,omitempty"`
	Notes    []string                `json:"notes,omitempty"` // limits of this answer
}

// tracer makes a Report.
type tracer struct {
	Config
	*Report
	ns      netns.NsHandle // of the instance
	nsPath  string
	client  client
	cgroups kernel.CgroupTree
	view    *inspect.View
	dry     *inspect.DryRun
	serves  bool           // the eBPF dataplane serves the address
	remote  netip.AddrPort // of the probe
}

// Trace explains the connection. It needs root.
func Trace(ctx context.Context, c Config) (*Report, error) {
	t := &tracer{Config: c, ns: netns.None(), Report: &Report{
		Source: c.From.String(), Destination: c.To.String(), DestinationPort: c.Port, ProtocolName: protocolName(c.Protocol), Steps: []Step{},
	}}
	defer t.close()
	view, err := inspect.OpenView(c.BPFFS)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return t.Report, t.withoutInstance(ctx)
	case err != nil:
		return nil, err
	}
	t.view = view
	if err := t.enter(); err != nil {
		return nil, err
	}
	return t.Report, t.run(ctx)
}

func protocolName(p model.Protocol) string {
	if p == model.UDP {
		return "udp"
	}
	return "tcp"
}

func (t *tracer) close() {
	if t.dry != nil {
		t.dry.Close()
	}
	if t.view != nil {
		t.view.Close()
	}
	if t.ns.IsOpen() {
		t.ns.Close()
	}
}

// enter opens the network namespace of the instance.
func (t *tracer) enter() error {
	t.nsPath = "/proc/thread-self/ns/net"
	own, err := kernel.CurrentNetns()
	if err != nil {
		return err
	}
	if owner := t.view.Netns(); owner.Cookie != 0 && owner.Cookie != own.Cookie {
		if t.nsPath = kernel.FindNetns(owner); t.nsPath == "" {
			return fmt.Errorf("enter network namespace %s of the agent: no process and no name shows it: run in the host's process namespace "+
				"(hostPID)", owner)
		}
	}
	if t.ns, err = kernel.OpenNetns(t.nsPath); err != nil {
		return err
	}
	return nil
}

// inside runs f in the instance's network namespace.
func (t *tracer) inside(f func() error) error { return kernel.Do(t.ns, f) }

func (t *tracer) run(ctx context.Context) error {
	t.Dataplane = "ebpf"
	if err := t.findClient(); err != nil {
		return err
	}
	t.SourcePort = t.choosePort()
	t.ClientPort = t.SourcePort
	err := t.inside(func() (err error) {
		t.dry, err = inspect.OpenDryRun(t.BPFFS)
		return err
	})
	if err != nil {
		return err
	}
	if err := t.decide(ctx); err != nil {
		return err
	}
	if t.serves || t.Refused {
		return t.probe(ctx)
	}
	// Another dataplane may serve the port: FTP, SCTP, or a takeover that is not complete.
	if err := t.netfilterSteps(ctx); err != nil {
		return err
	}
	return t.probe(ctx)
}

// add appends a step.
func (t *tracer) add(s Step) {
	if s.State == "" {
		s.State = Passed
	}
	t.Steps = append(t.Steps, s)
}

// note appends a limit of the answer, once.
func (t *tracer) note(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	for _, n := range t.Notes {
		if n == line {
			return
		}
	}
	t.Notes = append(t.Notes, line)
}

func (t *tracer) to() netip.AddrPort   { return netip.AddrPortFrom(t.To.Addr, t.Port) }
func (t *tracer) from() netip.AddrPort { return netip.AddrPortFrom(t.From.Addr, t.SourcePort) }
