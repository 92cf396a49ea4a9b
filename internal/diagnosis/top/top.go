// Package top shows the use of conntrack on this machine: entries and drops by network
// namespace, Service, endpoint and source. An agent adds names and its own flows, among them
// those of egress.
//
//	conntrack.ReadAll, Conn.Dump ──┐
//	Agent: names, its own flows ───┤
//	drops.Follower ────────────────┴─> Collector ──> Sample ──> Model (a terminal)
package top

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/node/conntrack"
)

// View is the kind of rows of a page.
type View int

// The views, in the order of their keys.
const (
	Namespaces View = iota
	Services        // destinations that are translated
	Endpoints       // translated destination
	Sources         // source of the flow
	Egress          // pods and their destinations outside, of the agent's own flows
	views
)

var viewNames = [views]string{"namespaces", "services", "endpoints", "sources", "egress"}

func (v View) String() string { return viewNames[v] }

// Plural returns what the rows of the view are.
func (v View) Plural() string {
	if v == Egress {
		return "destinations of pods"
	}
	return v.String()
}

// ViewNames lists the names of the views.
func ViewNames() []string { return slices.Clone(viewNames[:]) }

// ParseView returns the view of a name; false if there is none.
func ParseView(name string) (View, bool) {
	i := slices.Index(viewNames[:], name)
	return View(max(0, i)), i >= 0
}

// Row is one line of a page.
type Row struct {
	Name    string
	Address Address    // of other views than Namespaces
	Owner   Owner      // of Address, or of Client, as far as the agent knows it
	Client  netip.Addr // of Egress: the pod's
	Inode   uint64     // of a namespace
	Entries int
	Max     int     // of a namespace: capacity of its table
	Rate    float64 // entries a second by which it grew
	Drops   uint64  // packets dropped since the Collector began; of a namespace: conntrack's own
	PerSec  float64 // drops a second
	// Compared reports that there was an earlier Sample, so that Rate and PerSec are
	// known.
	Compared bool
	Report   *conntrack.Report // of a namespace
}

// key identifies a row in Samples of one view: its name may change.
func (r *Row) key() string {
	switch {
	case r.Inode != 0:
		return fmt.Sprint(r.Inode)
	case r.Client.IsValid():
		return r.Client.String() + " " + r.Address.String()
	case r.Address != Address{}:
		return r.Address.String()
	}
	return r.Name
}

// pod is the name of the pod of Client; its address if the name is unknown.
func (r *Row) pod() string { return cmp.Or(r.Owner.Pod, r.Client.String()) }

// Share returns the share of the table that is in use, 0 if the table's size is unknown.
func (r *Row) Share() float64 {
	if r.Max == 0 {
		return 0
	}
	return float64(r.Entries) / float64(r.Max)
}

// Use is Share as text; "-" if the table's size is unknown.
func (r *Row) Use() string {
	if r.Max == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*r.Share())
}

// NotInUse describes a machine where no namespace uses conntrack. serving is
// Collector.Serving.
func NotInUse(serving string) string {
	text := "conntrack is in use in no network namespace"
	if serving != "" {
		text += ": " + serving
	}
	return text
}

// Growth returns Rate with its sign; "-" if it is unknown.
func (r *Row) Growth() string {
	if !r.Compared {
		return "-"
	}
	return fmt.Sprintf("%+.0f", r.Rate)
}

// dropRate is PerSec as text; "-" if it is unknown.
func (r *Row) dropRate() string {
	if !r.Compared {
		return "-"
	}
	return fmt.Sprintf("%.0f", r.PerSec)
}

// expectations returns the number of expectations of all helpers.
func (r *Row) expectations() int {
	sum := 0
	for _, n := range r.Report.Expectations {
		sum += n
	}
	return sum
}

// Sample holds the state at one time.
type Sample struct {
	At   time.Time
	View View
	Rows []Row
	// Problems lists the parts that could not be read, one line each; the rest is
	// present.
	Problems []string
	Serving  string // of the Collector
}

// Collector reads Samples one after another and compares them.
type Collector struct {
	// ReadAll and Dump are conntrack's, or a test's.
	ReadAll func(context.Context) ([]conntrack.Report, error)
	Dump    func(context.Context, conntrack.Namespace, func(*conntrack.Entry) bool) error
	Pods    func() map[netip.Addr]string
	// Agent names addresses, and has flows that conntrack does not have; nil: none does.
	Agent Agent
	// Serving names a dataplane that serves without conntrack; may be empty.
	Serving string

	before map[string]Row
	at     time.Time
	view   View
	only   uint64

	mu      sync.Mutex
	dropped map[string]uint64 // by destination and by source, see Watch
	blind   string            // why no drops are seen
}

// NewCollector returns a Collector of this machine.
func NewCollector() *Collector {
	return &Collector{ReadAll: conntrack.ReadAll, Dump: dump, Pods: podNames, dropped: map[string]uint64{}}
}

func dump(ctx context.Context, n conntrack.Namespace, each func(*conntrack.Entry) bool) error {
	return n.Do(func(c *conntrack.Conn) error { return c.Dump(ctx, conntrack.Filter{}, each) })
}

func podNames() map[netip.Addr]string {
	list, _ := conntrack.Namespaces()
	return namesOf(drops.Pods(list))
}

// namesOf returns the pods by address. An address that several pods have on their devices is of none:
// a pod may add that of another.
func namesOf(pods []drops.Pod) map[netip.Addr]string {
	names := map[netip.Addr]string{}
	for _, p := range pods {
		for _, a := range p.Addresses {
			if other, taken := names[a]; taken && other != p.Name {
				names[a] = ""
				continue
			}
			names[a] = p.Name
		}
	}
	maps.DeleteFunc(names, func(_ netip.Addr, name string) bool { return name == "" })
	return names
}

// Watch counts drops by address until ctx ends.
func (c *Collector) Watch(ctx context.Context) {
	f, err := drops.Follow(drops.Config{Rate: 5000})
	if err != nil {
		c.mu.Lock()
		c.blind = fmt.Sprintf("drops by address are not seen: %v", err)
		c.mu.Unlock()
		return
	}
	defer f.Close()
	for {
		d, err := f.Next(ctx)
		if err != nil {
			return
		}
		c.count(&d)
	}
}

// maxCounted limits the number of stored addresses.
const maxCounted = 50_000

func (c *Collector) count(d *drops.Drop) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range []string{
		Address{d.Protocol, netip.AddrPortFrom(d.Destination, d.DestinationPort)}.String(),
		d.Source.String(),
	} {
		if _, known := c.dropped[key]; known || len(c.dropped) < maxCounted {
			c.dropped[key]++
		}
	}
}

// Read reads a Sample of one view. If only is not 0, only the entries of that namespace
// count; Egress is of the whole node. Errors of some namespaces are in Problems; Read returns
// an error if all fail.
func (c *Collector) Read(ctx context.Context, view View, only uint64) (Sample, error) {
	s := Sample{At: time.Now(), View: view, Serving: c.Serving}
	if view == Egress { // conntrack has none of it
		s.Rows = c.egress(ctx, &s)
		c.compare(&s, 0)
		return s, ctx.Err()
	}
	reports, err := c.ReadAll(ctx)
	// Without conntrack, an agent's own flows are all there is.
	if errors.Is(err, conntrack.ErrUnsupported) && (view == Namespaces || c.Agent == nil) || ctx.Err() != nil {
		return s, errors.Join(err, ctx.Err())
	}
	s.problem(err) // also without reports: maybe conntrack is not in use
	if view == Namespaces {
		s.Rows = namespaceRows(reports)
	} else {
		s.Rows = c.addresses(ctx, &s, reports, only)
	}
	c.compare(&s, only)
	return s, nil
}

// Compare returns the rows of network namespaces, the fullest first, with the rates since
// its previous call.
func (c *Collector) Compare(reports []conntrack.Report, at time.Time) []Row {
	s := Sample{At: at, View: Namespaces, Rows: namespaceRows(reports)}
	c.compare(&s, 0)
	sortRows(s.Rows, ByEntries)
	return s.Rows
}

func namespaceRows(reports []conntrack.Report) []Row {
	rows := make([]Row, 0, len(reports))
	for i := range reports {
		r := &reports[i]
		rows = append(rows, Row{
			Name: r.Namespace.String(), Inode: r.Namespace.Inode, Entries: r.Entries, Max: r.Limits.Max, Drops: r.Counters.Drop, Report: r,
		})
	}
	return rows
}

// problem adds the parts of err to Problems.
func (s *Sample) problem(err error) {
	var many interface{ Unwrap() []error }
	if errors.As(err, &many) {
		for _, e := range many.Unwrap() {
			s.problem(e)
		}
	} else if err != nil {
		s.Problems = append(s.Problems, err.Error())
	}
}

// addresses counts the entries, and the agent's own flows, by the key of the view.
func (c *Collector) addresses(ctx context.Context, s *Sample, reports []conntrack.Report, only uint64) []Row {
	counts := map[Address]int{}
	for _, r := range reports {
		if only != 0 && r.Namespace.Inode != only {
			continue
		}
		err := c.Dump(ctx, r.Namespace, func(e *conntrack.Entry) bool {
			if key, ok := keyOf(s.View, e); ok {
				counts[key]++
			}
			return true
		})
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			s.problem(fmt.Errorf("read conntrack of %s: %w", r.Namespace, err))
		}
	}
	c.countFlows(ctx, s, reports, only, counts)
	dropped := c.dropCounts(s)
	if s.View == Sources && only == 0 {
		// A host whose packets are dropped before conntrack has no entries: add its row.
		for key := range dropped {
			if addr, err := netip.ParseAddr(key); err == nil {
				counts[Address{AddrPort: netip.AddrPortFrom(addr, 0)}] += 0
			}
		}
	}
	pods, owners := c.Pods(), c.owners(ctx, s, counts)
	rows := make([]Row, 0, len(counts))
	for key, n := range counts {
		rows = append(rows, Row{Name: nameOf(key, owners[key], pods), Address: key, Owner: owners[key], Entries: n, Drops: dropped[key.String()]})
	}
	return rows
}

// dropCounts returns the counts of Watch, and adds to s why there are none.
func (c *Collector) dropCounts(s *Sample) map[string]uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.blind != "" {
		s.Problems = append(s.Problems, c.blind)
	}
	return maps.Clone(c.dropped)
}

func keyOf(v View, e *conntrack.Entry) (Address, bool) {
	key := Address{conntrack.ProtocolName(e.Protocol), e.Reply.Src}
	switch v {
	case Sources:
		return Address{AddrPort: netip.AddrPortFrom(e.Orig.Src.Addr(), 0)}, true
	case Services:
		key.AddrPort = e.Orig.Dst
	}
	return key, e.Orig.Dst != e.Reply.Src
}

// compare computes the rates since the previous Sample of the same view. A new address
// has grown from 0 entries; a new namespace may only have been unreadable before.
func (c *Collector) compare(s *Sample, only uint64) {
	took := s.At.Sub(c.at).Seconds()
	same := c.before != nil && c.view == s.View && c.only == only && took > 0
	now := make(map[string]Row, len(s.Rows))
	for i := range s.Rows {
		r := &s.Rows[i]
		key := r.key()
		old, known := c.before[key]
		r.Compared = same && (known || r.Inode == 0)
		if r.Compared {
			r.Rate = float64(r.Entries-old.Entries) / took
		}
		if r.Compared && known {
			r.PerSec = max(0, float64(r.Drops)-float64(old.Drops)) / took
		}
		now[key] = *r
	}
	c.before, c.at, c.view, c.only = now, s.At, s.View, only
}

// Order is the sort key of rows, largest first.
type Order int

// The orders.
const (
	ByEntries Order = iota
	ByDrops
	ByRate
)

func (o Order) String() string { return [...]string{"entries", "drops", "rate"}[o] }

// Sort sorts rows, those with the most entries first.
func Sort(rows []Row) { sortRows(rows, ByEntries) }

func sortRows(rows []Row, by Order) {
	slices.SortStableFunc(rows, func(a, b Row) int {
		first := 0
		switch by {
		case ByDrops:
			first = cmp.Or(cmp.Compare(b.PerSec, a.PerSec), cmp.Compare(b.Drops, a.Drops))
		case ByRate:
			first = cmp.Compare(b.Rate, a.Rate)
		}
		return cmp.Or(first, cmp.Compare(b.Entries, a.Entries), cmp.Compare(a.Name, b.Name))
	})
}
