package drops

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
)

var (
	errNoReasons = errors.New("this kernel does not say why it drops packets")
	errNoBTF     = errors.New("this kernel has no BTF (CONFIG_DEBUG_INFO_BTF), which describes its structures")
)

// Follower returns the drops of this machine one after another, from all of its network
// namespaces.
type Follower struct {
	objects  *ebpf.Collection
	links    []link.Link
	reader   *ringbuf.Reader
	reasons  *reasonTable
	symbols  *symbols
	places   *places
	evidence evidence
	missing  []string
	offset   time.Duration // from CLOCK_MONOTONIC to now
}

// optional holds the programs that find the part of netfilter that dropped a packet, each
// with the function that it needs and the function's module.
var optional = map[string]struct{ function, module string }{
	dropsProgHookEnter:      {"nf_hook_slow", ""},
	dropsProgNftEnter:       {"nft_do_chain", "nf_tables"},
	dropsProgNftLeave:       {"nft_do_chain", "nf_tables"},
	dropsProgIptEnter:       {"ipt_do_table", "ip_tables"},
	dropsProgIptLeave:       {"ipt_do_table", "ip_tables"},
	dropsProgIp6tEnter:      {"ip6t_do_table", "ip6_tables"},
	dropsProgIp6tLeave:      {"ip6t_do_table", "ip6_tables"},
	dropsProgNatLeave:       {"nf_nat_inet_fn", "nf_nat"},
	dropsProgAllocLeave:     {"__nf_conntrack_alloc", "nf_conntrack"},
	dropsProgConntrackLeave: {"nf_conntrack_in", "nf_conntrack"},
	dropsProgConfirmLeave:   {"__nf_conntrack_confirm", "nf_conntrack"},
	dropsProgListenEnter:    {"tcp_conn_request", ""},
}

// euid is another's in a test.
var euid = os.Geteuid

// Follow starts to follow drops. It needs root and a kernel with BTF and drop reasons
// (5.17); an error names the missing one.
func Follow(c Config) (*Follower, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if euid() != 0 {
		return nil, errors.New("follow dropped packets: not root: run it as root (CAP_SYS_ADMIN, or CAP_BPF with CAP_PERFMON)")
	}
	f := &Follower{}
	if err := f.open(&c); err != nil {
		f.Close()
		return nil, fmt.Errorf("follow dropped packets: %w", err)
	}
	return f, nil
}

func (f *Follower) open(c *Config) error {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return fmt.Errorf("%w: %w", errNoBTF, err)
	}
	if err := givesReasons(kernel); err != nil {
		return err
	}
	if f.reasons, err = readReasons(kernel); err != nil {
		return err
	}
	// Before the first report: a packet may be dropped at once.
	f.places = newPlaces(conntrack.Namespaces)
	f.evidence.places = f.places
	if f.symbols, err = readSymbols(); err != nil {
		f.missing = append(f.missing, fmt.Sprintf("the function that dropped: %v", err))
	}
	if err := f.load(c, kernel); err != nil {
		return err
	}
	if err := f.fillFilters(c); err != nil {
		return err
	}
	if f.reader, err = ringbuf.NewReader(f.objects.Maps[dropsMapTold]); err != nil {
		return fmt.Errorf("read ring buffer: %w", err)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("read clock: %w", err)
	}
	f.offset = time.Duration(time.Now().UnixNano() - now.Nano())
	return f.attach()
}

// givesReasons reports whether the tracepoint passes a reason, as it does since 5.17.
func givesReasons(kernel *btf.Spec) error {
	var tracepoint *btf.Typedef
	if err := kernel.TypeByName("btf_trace_kfree_skb", &tracepoint); err != nil {
		return fmt.Errorf("%w: it has no tracepoint kfree_skb", errNoReasons)
	}
	if pointer, ok := tracepoint.Type.(*btf.Pointer); ok {
		if proto, ok := pointer.Target.(*btf.FuncProto); ok && len(proto.Params) >= 4 {
			return nil // context, skb, location, reason
		}
	}
	return fmt.Errorf("%w: Linux 5.17 or later is needed", errNoReasons)
}

// load loads the programs whose functions this kernel has. If the programs that identify
// netfilter's parts do not load, it loads only the program that follows drops.
func (f *Follower) load(c *Config, kernel *btf.Spec) error {
	spec, err := loadDrops()
	if err != nil {
		return fmt.Errorf("read eBPF object: %w", err)
	}
	for name := range spec.Variables {
		if strings.HasPrefix(name, "unused_") {
			delete(spec.Variables, name)
		}
	}
	if err := f.setConstants(spec, c); err != nil {
		return err
	}
	for name, needs := range optional {
		if !hasFunction(kernel, needs.function, needs.module) {
			delete(spec.Programs, name)
			if _, err := os.Stat("/sys/module/" + needs.module); needs.module == "" || err == nil {
				f.miss(needs.function, errors.New("not in BTF"))
			}
		}
	}
	var options ebpf.CollectionOptions
	for _, module := range []string{"nf_tables", "x_tables"} {
		if types, err := btf.LoadKernelModuleSpec(module); err == nil {
			options.Programs.ExtraRelocationTargets = append(options.Programs.ExtraRelocationTargets, types)
		}
	}
	f.objects, err = ebpf.NewCollectionWithOptions(spec, options)
	if err == nil {
		return nil
	}
	f.miss("tables and chains of netfilter (its functions may not be traced)", shortened(err))
	for name := range optional {
		delete(spec.Programs, name)
	}
	if f.objects, err = ebpf.NewCollectionWithOptions(spec, options); err != nil {
		return fmt.Errorf("load eBPF programs: %w", shortened(err))
	}
	return nil
}

func (f *Follower) miss(what string, why error) {
	line := fmt.Sprintf("%s: %v", what, why)
	if !slices.Contains(f.missing, line) {
		f.missing = append(f.missing, line)
	}
}

// hasFunction reports whether the kernel, or the module, has a function.
func hasFunction(kernel *btf.Spec, function, module string) bool {
	var fn *btf.Func
	if kernel.TypeByName(function, &fn) == nil {
		return true
	}
	if module == "" {
		return false
	}
	spec, err := btf.LoadKernelModuleSpec(module)
	return err == nil && spec.TypeByName(function, &fn) == nil
}

// shortened removes the verifier's log from a one-line error, and advice that is outdated
// since 5.11.
func shortened(err error) error {
	if errors.Is(err, unix.EPERM) {
		return unix.EPERM
	}
	var ve *ebpf.VerifierError
	if errors.As(err, &ve) {
		return fmt.Errorf("%w: %v", ve.Cause, strings.Join(ve.Log[max(0, len(ve.Log)-2):], "; "))
	}
	return err
}

func (f *Follower) setConstants(spec *ebpf.CollectionSpec, c *Config) error {
	_, only, err := f.reasons.filter(c)
	if err != nil {
		return err
	}
	var ports [maxPorts]uint16
	for i, port := range c.Ports {
		ports[i] = port<<8 | port>>8
	}
	addresses, pods := prefixes(c.Addresses), prefixes(c.podAddresses())
	for name, value := range map[string]any{
		dropsVarAddresses: addresses, dropsVarAddressesCount: uint32(len(c.Addresses)),
		dropsVarPodAddresses: pods, dropsVarPodAddressesCount: uint32(len(c.podAddresses())),
		dropsVarPorts: ports, dropsVarPortsCount: uint32(len(c.Ports)),
		dropsVarOnlyProtocol: c.Protocol, dropsVarOnlyNetns: flag(len(c.Namespaces) > 0),
		dropsVarOnlyPods: flag(len(c.Pods) > 0), dropsVarOnlyReasons: flag(only),
		dropsVarRate: uint32(c.Rate), dropsVarNoGroups: flag(!c.All),
		dropsVarNetfilterReason: f.reasons.numbers[netfilterDrop],
		dropsVarListenReason:    f.reasons.numbers[listenOverflow],
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set eBPF constant %s: %w", name, err)
		}
	}
	return nil
}

func flag(on bool) uint8 {
	if on {
		return 1
	}
	return 0
}

// prefixes are addresses as the kernel's side compares them, word by word.
func prefixes(list []netip.Prefix) (out [maxPrefixes]dropsFilterPrefix) {
	for i, p := range list {
		words := 1
		if out[i].Family = 4; p.Addr().Is6() {
			out[i].Family, words = 6, 4
		}
		bytes, bits := p.Addr().AsSlice(), p.Bits()
		for w := range words {
			out[i].Addr[w] = binary.NativeEndian.Uint32(bytes[4*w:])
			var mask [4]byte
			binary.BigEndian.PutUint32(mask[:], uint32(uint64(0xffffffff)<<(32-min(32, max(0, bits-32*w)))))
			out[i].Mask[w] = binary.NativeEndian.Uint32(mask[:])
		}
	}
	return out
}

// fillFilters fills the maps of the filters.
func (f *Follower) fillFilters(c *Config) error {
	numbers, _, err := f.reasons.filter(c)
	if err != nil {
		return err
	}
	for _, number := range numbers {
		if err := f.objects.Maps[dropsMapReasons].Put(number, uint8(1)); err != nil {
			return fmt.Errorf("write filter of reasons: %w", err)
		}
	}
	_, err = f.Watch(c.Namespaces, c.Pods)
	return err
}

// Watch adds network namespaces, and those of pods, to those of Config: new ones may have
// replaced them. It returns their cookies; a deleted namespace has none.
func (f *Follower) Watch(namespaces []conntrack.Namespace, pods []Pod) (cookies []uint64, err error) {
	flags := map[uint64]uint32{}
	for _, n := range namespaces {
		flags[Cookie(n)] |= uint32(dropsPlaceFlagsPLACE_NETNS)
	}
	for _, p := range pods {
		for _, n := range p.Namespaces {
			flags[Cookie(n)] |= uint32(dropsPlaceFlagsPLACE_POD)
		}
	}
	delete(flags, 0)
	for cookie, flag := range flags {
		var before uint32
		_ = f.objects.Maps[dropsMapPlaces].Lookup(cookie, &before) // none: 0
		if err := f.objects.Maps[dropsMapPlaces].Put(cookie, before|flag); err != nil {
			return nil, fmt.Errorf("write filter of network namespaces: %w", err)
		}
		cookies = append(cookies, cookie)
	}
	return cookies, nil
}

// attach attaches the program that follows drops last, so that the others know each
// packet that it reports. Programs that replace unavailable ones come before it, too.
func (f *Follower) attach() error {
	attached := map[string]bool{}
	for name, p := range f.objects.Programs {
		needs, ok := optional[name]
		if !ok {
			continue
		}
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err != nil {
			f.miss(needs.function, err)
			continue
		}
		attached[name], f.links = true, append(f.links, l)
	}
	if !attached[dropsProgListenEnter] {
		l, err := link.AttachTracing(link.TracingOptions{Program: f.objects.Programs[dropsProgConsumeSkb]})
		if err != nil {
			return fmt.Errorf("attach to tracepoint consume_skb: %w", err)
		}
		f.links = append(f.links, l)
	}
	if !attached[dropsProgConntrackLeave] || !attached[dropsProgConfirmLeave] {
		f.evidence.begin()
	}
	l, err := link.AttachTracing(link.TracingOptions{Program: f.objects.Programs[dropsProgKfreeSkb]})
	if err != nil {
		return fmt.Errorf("attach to tracepoint kfree_skb: %w", err)
	}
	f.links = append(f.links, l)
	return nil
}

// Missing lists what this kernel cannot report, one line each.
func (f *Follower) Missing() []string { return f.missing }

// Next waits for the next drop. It is ctx's error when ctx ends.
func (f *Follower) Next(ctx context.Context) (Drop, error) {
	return f.NextOf(ctx, func(*Packet) bool { return true })
}

// NextOf waits for the next drop of a wanted packet. It skips others without a look for their places,
// which takes long on a busy node.
func (f *Follower) NextOf(ctx context.Context, wanted func(*Packet) bool) (Drop, error) {
	for ctx.Err() == nil {
		// A deadline does not reach a Read that waits already.
		f.reader.SetDeadline(time.Now().Add(closeCheckInterval))
		record, err := f.reader.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			return Drop{}, fmt.Errorf("read dropped packet: %w", err)
		}
		var raw dropsDrop
		if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &raw); err != nil {
			return Drop{}, fmt.Errorf("decode dropped packet: %w", err)
		}
		packet := decodePacket(&raw)
		if !wanted(&packet) {
			continue
		}
		if d, ok := f.toDrop(&raw); ok {
			return d, nil
		}
	}
	return Drop{}, ctx.Err()
}

// Enter runs do in the network namespace in which a packet was dropped, on a thread of
// its own. It returns os.ErrNotExist if the namespace was deleted, or never found.
func (f *Follower) Enter(d *Drop, do func() error) error {
	n, known := f.places.at(d.cookie)
	if !known {
		return fmt.Errorf("enter network namespace %s: %w", d.Namespace, os.ErrNotExist)
	}
	return n.enter(do)
}

// closeCheckInterval is how often a Follower that waits looks whether it is to end.
const closeCheckInterval = 100 * time.Millisecond

// toDrop converts a record of the eBPF side to a Drop, unless it is a SYN that was not
// dropped.
func (f *Follower) toDrop(raw *dropsDrop) (Drop, bool) {
	if dropsDropPath(raw.Path) == dropsDropPathPATH_SYN {
		from := netip.AddrPortFrom(address(raw.Family, raw.Saddr), port(raw.Sport))
		to := netip.AddrPortFrom(address(raw.Family, raw.Daddr), port(raw.Dport))
		if !f.evidence.overflowed(raw.Cookie, from, to) {
			return Drop{}, false
		}
	}
	return f.decode(raw), true
}

// Counts reads the counters.
func (f *Follower) Counts() (Counts, error) {
	sum := func(which dropsDropCounter) (n uint64, err error) {
		var perCPU []uint64
		err = f.objects.Maps[dropsMapCounters].Lookup(uint32(which), &perCPU)
		for _, v := range perCPU {
			n += v
		}
		return n, err
	}
	var c Counts
	var errs [4]error
	c.Seen, errs[0] = sum(dropsDropCounterDROPS_SEEN)
	c.Matched, errs[1] = sum(dropsDropCounterDROPS_MATCHED)
	c.Limited, errs[2] = sum(dropsDropCounterDROPS_LIMITED)
	c.Lost, errs[3] = sum(dropsDropCounterDROPS_LOST)
	if err := errors.Join(errs[:]...); err != nil {
		return c, fmt.Errorf("read counters: %w", err)
	}
	return c, nil
}

// Reasons counts the drops that match the filters, by the kernel's reason, since the
// Follower began, whether or not they were reported. SYNs to full listeners are included
// only where fentry is available.
func (f *Follower) Reasons() (map[string]uint64, error) {
	counts := map[string]uint64{}
	var number uint32
	var perCPU []uint64
	entries := f.objects.Maps[dropsMapByReason].Iterate()
	for entries.Next(&number, &perCPU) {
		for _, n := range perCPU {
			counts[f.reasons.name(number)] += n
		}
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read counters of reasons: %w", err)
	}
	return counts, nil
}

// Close detaches the programs.
func (f *Follower) Close() {
	for _, l := range f.links {
		l.Close()
	}
	if f.reader != nil {
		f.reader.Close()
	}
	if f.objects != nil {
		f.objects.Close()
	}
}
