package change

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// Side is the work of one dataplane, in a process and on a node of its own. It covers the
// path of a change from the source's event to the kernel's acknowledgment, without the
// source.
type Side struct {
	// Open opens the dataplane; its memory counts from before that.
	Open     func(context.Context) (dataplane.Backend, error)
	Node     string
	Pod      netip.Addr // of the probe
	Services int
	Changes  int // in each batch

	backend dataplane.Backend
}

// Cold holds the costs of the first sync of everything.
type Cold struct {
	Seconds   float64 `json:"seconds"` // decisions and kernel
	CPU       float64 `json:"cpu_seconds"`
	RSS       float64 `json:"rss_mib"`
	KernelMiB float64 `json:"kernel_mib"` // slab, vmalloc and per-CPU memory of the whole machine, minus the initial amount
}

// Batch holds the costs of single changes, one after the other.
type Batch struct {
	Millis []float64 `json:"ms"`
	CPU    float64   `json:"cpu_ms_per_change"` // children included
	RSS    float64   `json:"rss_mib"`
	Full   float64   `json:"full_sync_seconds"` // a full sync without a change
}

// Run writes all objects and prints a Cold. Then, for each line of input, it makes
// changes and prints a Batch. It ends with the input.
func (s *Side) Run(ctx context.Context, in io.Reader, out io.Writer) error {
	memory, err := kernelMemory()
	if err != nil {
		return err
	}
	if s.backend, err = s.Open(ctx); err != nil {
		return err
	}
	defer s.backend.Close()
	addrs, err := kernel.Addrs()
	if err != nil {
		return err
	}
	enc := json.NewEncoder(out)
	tracker := intent.New(intent.Config{NodeName: s.Node, ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}})
	all := world(s.Services, s.Node, s.Pod)
	cold, err := s.cold(ctx, tracker, all, addrs)
	if err != nil {
		return err
	}
	cold.KernelMiB -= memory
	if err := enc.Encode(cold); err != nil {
		return err
	}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		b, err := s.batch(ctx, tracker)
		if err != nil {
			return err
		}
		if err := enc.Encode(b); err != nil {
			return err
		}
	}
	return nil
}

func (s *Side) cold(ctx context.Context, tracker *intent.Tracker, all model.Delta, addrs []netip.Addr) (Cold, error) {
	cpu, start := cpuSeconds(), time.Now()
	tracker.SetNodeAddrs(addrs)
	tracker.Apply(all)
	if err := s.backend.Replace(ctx, tracker.State()); err != nil {
		return Cold{}, fmt.Errorf("write everything: %w", err)
	}
	c := Cold{Seconds: time.Since(start).Seconds(), CPU: cpuSeconds() - cpu}
	debug.FreeOSMemory() // as the agent does after its first sync
	var err error
	if c.KernelMiB, err = kernelMemory(); err != nil {
		return Cold{}, err
	}
	c.RSS, err = rss()
	return c, err
}

func (s *Side) batch(ctx context.Context, tracker *intent.Tracker) (Batch, error) {
	var b Batch
	ready := map[int]bool{}
	cpu := cpuSeconds()
	for range s.Changes {
		i := changed(s.Services)
		was, touched := ready[i]
		ready[i] = touched && !was
		sl := slice(i, ready[i])
		start := time.Now()
		c := tracker.Apply(model.Delta{Slices: map[model.Name]*model.EndpointSlice{sl.Name: sl}})
		if err := s.backend.Apply(ctx, c); err != nil {
			return b, fmt.Errorf("write a change: %w", err)
		}
		b.Millis = append(b.Millis, time.Since(start).Seconds()*1e3)
	}
	b.CPU = (cpuSeconds() - cpu) * 1e3 / float64(s.Changes)
	back := model.Delta{Slices: map[model.Name]*model.EndpointSlice{}}
	for i := range ready {
		sl := slice(i, true)
		back.Slices[sl.Name] = sl
	}
	if err := s.backend.Apply(ctx, tracker.Apply(back)); err != nil {
		return b, fmt.Errorf("take changes back: %w", err)
	}
	start := time.Now()
	if err := s.backend.Replace(ctx, tracker.State()); err != nil {
		return b, fmt.Errorf("write everything again: %w", err)
	}
	b.Full = time.Since(start).Seconds()
	var err error
	b.RSS, err = rss()
	return b, err
}

// changed selects the Service of a change: evenly spread, and the same number on nodes of
// any size. So the comparison depends on the size of the table, not on its share in the
// processor's caches.
func changed(services int) int {
	const busy = 100
	n := min(busy, services)
	return rand.IntN(n) * (services / n)
}

// cpuSeconds is the time that this process and the children that have ended
// have used.
func cpuSeconds() float64 {
	total := 0.0
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if unix.Getrusage(who, &u) == nil {
			total += float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
		}
	}
	return total
}

// rss is this process's resident memory in MiB.
func rss() (float64, error) {
	fields, err := procFields("/proc/self/status", "VmRSS")
	return fields / 1024, err
}

// kernelMemory returns the memory of the kernel's own objects, in MiB.
func kernelMemory() (float64, error) {
	kib, err := procFields("/proc/meminfo", "Slab", "VmallocUsed", "Percpu")
	return kib / 1024, err
}

// procFields adds up some "Name: N kB" lines of a file.
func procFields(path string, names ...string) (float64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	sum := 0.0
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		if !slices.Contains(names, name) {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		if err != nil {
			return 0, fmt.Errorf("read %s: line %q: %w", path, line, err)
		}
		sum += n
	}
	return sum, nil
}
