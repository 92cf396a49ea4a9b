package services

import (
	"cmp"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/escape"
	pages "spillway.dev/spillway/internal/page"
)

// listResult is a list of Services.
type listResult struct {
	*nodev1alpha1.ListServicesResponse
	namespace string
}

// mostFindings is how many findings a list names.
const mostFindings = 3

// explained says where findings have their evidence and their fixes.
const explained = "spillway doctor shows evidence and fixes"

// health is the health of one port: the worst of the Service's faults that concern it.
func health(s *nodev1alpha1.Service, p *nodev1alpha1.ServicePort, faults []doctor.Finding) string {
	for _, f := range faults {
		if of := f.Object.Port; of == "" || of == p.Name || of == fmt.Sprint(p.Port) {
			return f.ID
		}
	}
	switch {
	case len(s.Problems) > 0:
		return "problem"
	case s.Health == "": // an earlier agent
		return "-"
	}
	return "ok"
}

// MarshalJSON implements json.Marshaler.
func (r listResult) MarshalJSON() ([]byte, error) { return nodeclient.JSON(r.ListServicesResponse) }

// ofBothFamilies joins the ports that both families have alike, but for their addresses.
func ofBothFamilies(ports []*nodev1alpha1.ServicePort) (joined []*nodev1alpha1.ServicePort) {
	for _, p := range ports {
		i := slices.IndexFunc(joined, func(q *nodev1alpha1.ServicePort) bool {
			return q.Family != p.Family && q.Name == p.Name && q.Port == p.Port && q.Protocol == p.Protocol && q.Dataplane == p.Dataplane &&
				q.EndpointCount == p.EndpointCount && slices.Equal(q.Differences, p.Differences)
		})
		if i < 0 {
			joined = append(joined, p)
			continue
		}
		both := proto.CloneOf(joined[i])
		for _, f := range p.Frontends {
			// A NodePort has all addresses of both.
			if !slices.ContainsFunc(both.Frontends, func(g *nodev1alpha1.Frontend) bool { return address(f) == address(g) }) {
				both.Frontends = append(both.Frontends, f)
			}
		}
		joined[i] = both
	}
	return joined
}

// Write prints one line for each port.
func (r listResult) Write(w io.Writer) error {
	t := pages.NewTable(pages.Column{Name: "NAMESPACE", Least: 8, Cut: true}, pages.Column{Name: "NAME", Least: 12, Cut: true},
		pages.Text("TYPE").OnlyWide(), pages.Text("PORT"), pages.Text("ADDRESS").Shrinks(16), pages.Number("ENDPOINTS"),
		pages.Text("BY").Shrinks(6), pages.Text("HEALTH").Shrinks(10), pages.Text("PROBLEMS").OnlyWide())
	troubled := 0
	var found []doctor.Finding
	for _, s := range r.Services {
		faults := nodeclient.Faults(s.Findings)
		if len(s.Problems) > 0 || len(faults) > 0 {
			troubled++
		}
		found = append(found, faults...)
		for _, p := range ofBothFamilies(s.Ports) {
			t.Row(s.Namespace, s.Name, s.Type, portText(p), addresses(p), p.EndpointCount, by(p), health(s, p, faults),
				len(s.Problems))
		}
	}
	doctor.Sort(found)
	switch {
	case len(r.Services) == 0 && r.namespace != "":
		t.Foot("no Service of namespace %s is served on this node", escape.Text(r.namespace))
	case len(r.Services) == 0:
		t.Foot("no Service is served on this node")
	case troubled > 0:
		t.Verdict(pages.Warning, pages.Counted(len(r.Services), "Service"), "%d with problems or findings, which the details of a Service show",
			troubled)
	default:
		t.Foot("%s", pages.Counted(len(r.Services), "Service"))
	}
	for i, f := range found {
		if i == mostFindings {
			t.Foot("and %d more", len(found)-i)
			break
		}
		t.Verdict(pages.Warning, "finding", "%s", escape.Text(f.Title))
	}
	if len(found) > 0 {
		t.Foot(explained)
	}
	if note := nodeclient.NewerAgent(r.ListServicesResponse); note != "" {
		t.Foot("%s", note)
	}
	return t.Write(w)
}

// portText is a port as in "http 80/TCP".
func portText(p *nodev1alpha1.ServicePort) string {
	port := fmt.Sprint(p.Port)
	if p.Protocol != nodev1alpha1.Protocol_PROTOCOL_UNSPECIFIED {
		port += "/" + nodeclient.Protocol(p.Protocol)
	}
	return strings.TrimSpace(p.Name + " " + port)
}

// addresses lists the addresses of a port in a short form.
func addresses(p *nodev1alpha1.ServicePort) string {
	if len(p.Frontends) == 0 {
		return "none"
	}
	var list []string
	for _, f := range p.Frontends {
		list = append(list, address(f))
	}
	return strings.Join(list, ", ")
}

// address is an address and port of a frontend; a NodePort has all addresses.
func address(f *nodev1alpha1.Frontend) string {
	host := f.Address
	if host == "" {
		host = "*"
	}
	return net.JoinHostPort(host, fmt.Sprint(f.Port))
}

func by(p *nodev1alpha1.ServicePort) string {
	if p.Dataplane == "" {
		return "nothing"
	}
	return p.Dataplane
}

// oneResult is one Service.
type oneResult struct {
	*nodev1alpha1.GetServiceResponse
}

// MarshalJSON implements json.Marshaler.
func (r oneResult) MarshalJSON() ([]byte, error) { return nodeclient.JSON(r.GetServiceResponse) }

// Write prints the Service, port by port.
func (r oneResult) Write(w io.Writer) error {
	p, s := pages.Of(w), r.Service
	title := fmt.Sprintf("Service %s/%s", s.Namespace, s.Name)
	if s.Type != "" {
		title += ", " + s.Type
	}
	if _, err := fmt.Fprintln(p, p.Paint(pages.Strong, escape.Text(title))); err != nil {
		return fmt.Errorf("write Service: %w", err)
	}
	differences := 0
	for _, port := range s.Ports {
		differences += len(port.Differences)
		for _, t := range []*pages.Table{facts(port), frontends(port), endpoints(port), counters(s, port), differing(port)} {
			if t == nil {
				continue
			}
			if _, err := fmt.Fprintln(p); err != nil {
				return fmt.Errorf("write Service: %w", err)
			}
			if err := t.Write(p); err != nil {
				return err
			}
		}
	}
	if t := findings(s); t != nil {
		if _, err := fmt.Fprintln(p); err != nil {
			return fmt.Errorf("write Service: %w", err)
		}
		if err := t.Write(p); err != nil {
			return err
		}
	}
	end := problems(s)
	r.verdict(end, differences)
	if note := nodeclient.NewerAgent(r.GetServiceResponse); note != "" {
		end.Foot("%s", note)
	}
	if _, err := fmt.Fprintln(p); err != nil {
		return fmt.Errorf("write Service: %w", err)
	}
	return end.Write(p)
}

// balanceTexts explains the values of ServicePort.Balance.
var balanceTexts = map[string]string{
	"least":   "least: of two endpoints, the one with fewer active flows",
	"maglev":  "maglev: by the client's address and port, the same on all nodes",
	"latency": "latency: of two endpoints, the one with less expected delay",
}

// direct explains ServicePort.Forwarding, which is hybrid for TCP and dsr for UDP.
const direct = "direct: an endpoint on another node sees the client's address, and its node answers the client"

// facts is the table of single facts about a port.
func facts(p *nodev1alpha1.ServicePort) *pages.Table {
	t := pages.NewTable(pages.Column{}, pages.Column{Least: 20})
	name := portText(p)
	if p.Family != "" {
		name += ", " + p.Family
	}
	t.Row("Port", name)
	t.Row("Served by", by(p))
	if p.ExternalTrafficPolicy != "" {
		t.Row("Policies", fmt.Sprintf("%s for traffic from outside, %s from inside", p.ExternalTrafficPolicy, p.InternalTrafficPolicy))
	}
	if p.Affinity != nil {
		t.Row("Affinity", "by client, for "+p.Affinity.AsDuration().String())
	}
	if p.LocalRedirect != "" {
		t.Row("Redirect", "to "+p.LocalRedirect+" while it has a ready endpoint on this node")
	}
	if p.Balance != "" {
		t.Row("Balance", cmp.Or(balanceTexts[p.Balance], p.Balance))
	}
	if p.Forwarding != "" {
		t.Row("Forwarding", direct)
	}
	if text := encapsulations(p.Endpoints); text != "" {
		t.Row("Encapsulation", text)
	}
	if p.SynLimit > 0 {
		t.Row("SYN filter", fmt.Sprintf("at devices with XDP, beyond %d SYNs a second on a CPU, clients must prove their address", p.SynLimit))
	}
	if p.Helper != "" {
		t.Row("Helper", p.Helper)
	}
	return t
}

func frontends(p *nodev1alpha1.ServicePort) *pages.Table {
	if len(p.Frontends) == 0 {
		return nil
	}
	t := pages.NewTable(pages.Text("ADDRESS").Shrinks(16), pages.Text("KIND"), pages.Text("CLIENTS").Shrinks(16))
	for _, f := range p.Frontends {
		clients := "all"
		if len(f.SourceRanges) > 0 {
			clients = strings.Join(f.SourceRanges, ", ")
		}
		t.Row(address(f), f.Kind, clients)
	}
	return t
}

// endpoints is the table of endpoints; USED are those that get new connections on this node, and
// FLOWS counts its flow table.
func endpoints(p *nodev1alpha1.ServicePort) *pages.Table {
	if len(p.Endpoints) == 0 && len(p.Frontends) == 0 {
		return nil
	}
	t := pages.NewTable(pages.Text("ENDPOINT").Shrinks(16), pages.Column{Name: "POD", Least: 10, Cut: true},
		pages.Column{Name: "NODE", Least: 8, Cut: true},
		pages.Text("STATE"), pages.Text("USED"), pages.Text("FLOWS"))
	sum := uint32(0)
	for _, e := range p.Endpoints {
		sum += e.Shares
	}
	for _, e := range p.Endpoints {
		t.Row(net.JoinHostPort(e.Address, fmt.Sprint(e.Port)), orNone(e.Pod), orNone(e.Node), state(e), used(e, sum), flows(e.Flows))
	}
	if len(p.Endpoints) == 0 {
		t.Foot("no endpoint: connections are refused or dropped")
	}
	return t
}

// used says whether an endpoint gets new connections, and with weights its shares of all.
func used(e *nodev1alpha1.Endpoint, allShares uint32) string {
	switch {
	case e.Ejected:
		return "ejected"
	case !e.InUse:
		return "no"
	case allShares > 0:
		return fmt.Sprintf("%d of %d", e.Shares, allShares)
	}
	return "yes"
}

// flows is the number of flows to an endpoint, and of those that wait for its answer.
func flows(f *nodev1alpha1.EndpointFlows) string {
	switch {
	case f == nil:
		return "-"
	case f.Waiting > 0:
		return fmt.Sprintf("%d, %d wait", f.Answered+f.Waiting, f.Waiting)
	}
	return fmt.Sprint(f.Answered)
}

// encapsulations says how packets tell the nodes of endpoints about the Service; "": none is probed.
func encapsulations(endpoints []*nodev1alpha1.Endpoint) string {
	const most = 4 // endpoints that are named
	var order []string
	by := map[string][]string{}
	for _, e := range endpoints {
		name := e.Encapsulation
		if name == "" {
			continue
		}
		if e.EncapsulationMtu > 0 {
			name += fmt.Sprintf(" (MTU %d)", e.EncapsulationMtu)
		}
		if by[name] == nil {
			order = append(order, name)
		}
		by[name] = append(by[name], e.Address)
	}
	for i, name := range order {
		list := by[name]
		order[i] = name + ": " + strings.Join(list[:min(len(list), most)], ", ")
		if more := len(list) - most; more > 0 {
			order[i] += fmt.Sprintf(" and %d more", more)
		}
	}
	return strings.Join(order, "; ")
}

func orNone(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// state is what the API says about an endpoint.
func state(e *nodev1alpha1.Endpoint) string {
	switch {
	case e.Terminating && e.Serving:
		return "terminating, serves"
	case e.Terminating:
		return "terminating"
	case e.Ready:
		return "ready"
	}
	return "not ready"
}

// counters is nil for a port that is not counted.
func counters(s *nodev1alpha1.Service, p *nodev1alpha1.ServicePort) *pages.Table {
	c := p.Counters
	if c == nil {
		return nil
	}
	t := pages.NewTable(pages.Number("CONNECTIONS"), pages.Number("ACTIVE"), pages.Number("REFUSED"), pages.Number("DROPPED"),
		pages.Number("BYTES IN"), pages.Number("BYTES OUT"))
	if c.ConnectionsOnly {
		t.Row(c.Connections, c.Active, c.Refused, c.Dropped, "-", "-")
	} else {
		t.Row(c.Connections, c.Active, c.Refused, c.Dropped, c.BytesToEndpoint, c.BytesToClient)
	}
	// HEALTH is ok while a traffic policy or a source range refuses clients: only events have the reason.
	var kinds []string
	if c.Refused > 0 {
		kinds = append(kinds, "refused")
	}
	if c.Dropped > 0 {
		kinds = append(kinds, "dropped")
	}
	if len(kinds) > 0 {
		name := escape.Shell(escape.Text(s.Namespace + "/" + s.Name))
		t.Foot("reasons: spillway flows --service %s --event %s --since 1m", name, strings.Join(kinds, ","))
	}
	return t
}

// differing is the table of differences; nil if there are none.
func differing(p *nodev1alpha1.ServicePort) *pages.Table {
	if len(p.Differences) == 0 {
		return nil
	}
	t := pages.NewTable(pages.Text("DIFFERENCE").Shrinks(20))
	for _, d := range p.Differences {
		t.Row(d)
	}
	return t
}

// problems is the table of Problems, which may be empty.
func problems(s *nodev1alpha1.Service) *pages.Table {
	t := pages.NewTable(pages.Text("PROBLEM").Shrinks(12), pages.Text("").Shrinks(20))
	for _, p := range s.Problems {
		t.Row(p.Where, p.What)
	}
	return t
}

// findings is the table of findings; nil if there are none.
func findings(s *nodev1alpha1.Service) *pages.Table {
	if len(s.Findings) == 0 {
		return nil
	}
	t := pages.NewTable(pages.Text("FINDING").Shrinks(16), pages.Text("SEVERITY"), pages.Text("SINCE").OnlyWide(), pages.Text("").Shrinks(30))
	for _, f := range nodeclient.Findings(s.Findings) {
		since := "-"
		if !f.Since.IsZero() {
			since = f.Since.Format(time.RFC3339)
		}
		t.Row(f.ID, f.Severity, since, f.Title)
	}
	t.Foot(explained)
	return t
}

// verdict adds the last line: whether the kernel holds what is wanted.
func (r oneResult) verdict(t *pages.Table, differences int) {
	compared, served := 0, 0
	for _, p := range r.Service.Ports {
		if p.Compared {
			compared++
		}
		if p.Dataplane != "" {
			served++
		}
	}
	switch {
	case differences > 0:
		t.Verdict(pages.Bad, pages.Counted(differences, "difference"),
			"the kernel does not hold what is wanted; the agent repairs this at its next full sync")
	case served < len(r.Service.Ports):
		t.Verdict(pages.Bad, "not served", "%d of %s", len(r.Service.Ports)-served, pages.Counted(len(r.Service.Ports), "port"))
	case compared < served:
		t.Verdict(pages.Warning, "written", "the agent has written what is wanted; it was not compared with the kernel")
	default:
		t.Verdict(pages.Good, "as wanted", "the kernel holds what is wanted")
	}
}
