package flows

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// table is the kernel's table.
type table struct {
	*nodev1alpha1.ListFlowsResponse
	now   time.Time
	nodes bool // name the node of each flow
}

// MarshalJSON implements json.Marshaler.
func (r table) MarshalJSON() ([]byte, error) { return nodeclient.JSON(r.ListFlowsResponse) }

// Write prints a line for each flow.
func (r table) Write(w io.Writer) error {
	columns := []page.Column{page.Text("PROTO"), page.Text("CLIENT").Shrinks(12), page.Text("SERVICE").Shrinks(12),
		page.Text("ENDPOINT").Shrinks(12), page.Text("STATE").Shrinks(8), page.Number("AGE"), page.Number("IDLE").OnlyWide()}
	if r.nodes {
		columns = slices.Insert(columns, 0, page.Text("NODE").Shrinks(8))
	}
	t := page.NewTable(columns...)
	now := timestamppb.New(r.now)
	for _, f := range r.Flows {
		row := []any{nodeclient.Protocol(f.Protocol), peer(f.Client), service(f), peer(f.Endpoint), state(f),
			nodeclient.Age(now, f.Opened), nodeclient.Age(now, f.LastSeen)}
		if r.nodes {
			row = slices.Insert(row, 0, any(f.Node))
		}
		t.Row(row...)
	}
	switch {
	case len(r.Flows) == 0:
		t.Foot("no flow of this kind is in the table; sockets of this node's Pods connect to endpoints directly")
	case r.More:
		t.Foot("%d flows, and there are more: select them, or give a larger --limit", len(r.Flows))
	default:
		t.Foot("%d in the table", len(r.Flows))
	}
	if note := dsrNote(r.Flows); note != "" {
		t.Foot("%s", note)
	}
	if slices.ContainsFunc(r.Flows, (*nodev1alpha1.Flow).GetEgress) {
		t.Foot("egress: a Pod's own connection to the outside, which sees this address and port of the node")
	}
	if note := nodeclient.NewerAgent(r.ListFlowsResponse); note != "" {
		t.Foot("%s", note)
	}
	return t.Write(w)
}

// state is the state of a flow, how it was closed, and whether replies take another way.
func state(f *nodev1alpha1.Flow) string {
	var more []string
	if f.ClosedByRst {
		more = append(more, "RST")
	}
	if f.Dsr {
		more = append(more, "DSR")
	}
	if f.OneWay {
		more = append(more, "one way")
	}
	if len(more) == 0 {
		return f.State
	}
	return f.State + " (" + strings.Join(more, ", ") + ")"
}

// dsrNote explains the marks of DSR flows; "" if there is none.
func dsrNote(flows []*nodev1alpha1.Flow) string {
	switch {
	case slices.ContainsFunc(flows, (*nodev1alpha1.Flow).GetOneWay):
		return "DSR: the endpoint's node answers the client itself; one way: no reply passes this node"
	case slices.ContainsFunc(flows, (*nodev1alpha1.Flow).GetDsr):
		return "DSR: this node answers the client itself, not through the node that received the connection"
	}
	return ""
}

// peer is the Pod and port of an end, or its address; "-" if it is unknown.
func peer(p *nodev1alpha1.Peer) string {
	switch {
	case p == nil || p.Address == "":
		return "-"
	case p.Port == 0: // the destination of a ping
		return cmp.Or(p.Pod, p.Address)
	case p.Pod != "":
		return fmt.Sprintf("%s:%d", p.Pod, p.Port)
	}
	return net.JoinHostPort(p.Address, fmt.Sprint(p.Port))
}

// service is the name of the Service and its port, or its address. A Pod's own connection to the outside
// has neither: it has the address and port that its destination sees.
func service(f *nodev1alpha1.Flow) string {
	if f.Egress {
		return "egress as " + peer(f.Source)
	}
	if f.Service == "" {
		return peer(f.ServiceAddress)
	}
	name := f.Namespace + "/" + f.Service
	switch {
	case f.PortName != "":
		name += ":" + f.PortName
	case f.ServiceAddress != nil:
		name += fmt.Sprint(":", f.ServiceAddress.Port)
	}
	return name
}

// printer prints events of several agents.
type printer struct {
	nodes bool // name the node of each event

	mu     sync.Mutex
	page   *page.Page
	notes  io.Writer
	output cli.Output
	any    bool // an event was printed
}

func newPrinter(out, notes io.Writer, output cli.Output) *printer {
	return &printer{page: page.Of(out), notes: notes, output: output}
}

// note prints a line for people.
func (p *printer) note(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintln(p.notes, text)
}

// events prints the events of a message. node is the agent's, if several are asked.
func (p *printer) events(node string, resp *nodev1alpha1.WatchFlowsResponse) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range resp.Events {
		p.any = true
		if node != "" && e.Flow != nil {
			e.Flow.Node = node // the API server's name, whatever the agent says
		}
		if err := p.event(e); err != nil {
			return err
		}
	}
	if resp.Missed > 0 {
		of := ""
		if node != "" {
			of = "node " + escape.Text(node) + ": "
		}
		fmt.Fprintf(p.notes, "%s%d events are missing here: they came faster than this program read them\n", of, resp.Missed)
	}
	return nil
}

// event prints one event: a line, or one document.
func (p *printer) event(e *nodev1alpha1.FlowEvent) error {
	if p.output.ForPrograms() {
		text, err := nodeclient.JSON(e)
		if err != nil {
			return fmt.Errorf("write event: %w", err)
		}
		return p.output.Encode(p.page, json.RawMessage(text), "")
	}
	if _, err := fmt.Fprintln(p.page, p.line(e)); err != nil {
		return fmt.Errorf("write event: %w", err)
	}
	return nil
}

func (p *printer) line(e *nodev1alpha1.FlowEvent) string {
	f := e.Flow
	if f == nil {
		f = &nodev1alpha1.Flow{}
	}
	kind, style := strings.ToLower(strings.TrimPrefix(e.Kind.String(), "EVENT_KIND_")), page.Plain
	if e.Kind == nodev1alpha1.EventKind_EVENT_KIND_REFUSED || e.Kind == nodev1alpha1.EventKind_EVENT_KIND_DROPPED {
		style = page.Bad
	}
	parts := []string{e.Time.AsTime().Local().Format("15:04:05.000")}
	if p.nodes {
		parts = append(parts, f.Node)
	}
	parts = append(parts, p.page.Paint(style, fmt.Sprintf("%-8s", escape.Text(kind))), nodeclient.Protocol(f.Protocol),
		peer(f.Client), "->", service(f))
	if f.Endpoint != nil {
		parts = append(parts, "->", peer(f.Endpoint))
	}
	if f.BySocket {
		parts = append(parts, "(socket)")
	}
	parts = append(parts, details(e, f)...)
	for i, text := range parts {
		if i != p.painted() {
			parts[i] = escape.Text(text)
		}
	}
	return strings.Join(parts, " ")
}

// painted is the place of the kind in a line: it is escaped before it is painted.
func (p *printer) painted() int {
	if p.nodes {
		return 2
	}
	return 1
}

// details are what is known of the event beside its ends.
func details(e *nodev1alpha1.FlowEvent, f *nodev1alpha1.Flow) (out []string) {
	if e.Reason != "" {
		out = append(out, e.Reason)
	}
	if f.Handshake != nil {
		out = append(out, "after "+f.Handshake.AsDuration().Round(10*time.Microsecond).String())
	}
	if f.BytesToEndpoint+f.BytesToClient > 0 {
		out = append(out, fmt.Sprintf("%d bytes to the endpoint, %d back", f.BytesToEndpoint, f.BytesToClient))
	}
	return out
}
