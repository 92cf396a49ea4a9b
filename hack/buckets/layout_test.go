package buckets

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// ways is the number of slots of a bucket, as in bpf/buckets.bpf.c.
const ways = 8

// Flags of a run, as in bpf/common.h.
const (
	runRandom = 1 << iota
	runIPv6
	runSNAT
	runTick
	runCheck
	runOnePort
)

// run is struct run of bpf/common.h: what one CPU does, and its counters.
type run struct {
	First, Flows, Flags, Time       uint32
	Zero, Next, Sum                 uint64
	Done, Missed, Refused, Replaced uint64
	Busy, Torn                      uint64
	Pad                             [5]uint64
}

// layout is a loaded table with its programs.
type layout struct {
	name string
	*ebpf.Collection
}

// compile returns the programs of bpf/NAME.bpf.c.
func compile(t testing.TB, name string) *ebpf.CollectionSpec {
	t.Helper()
	object := filepath.Join(t.TempDir(), name+".o")
	clang := exec.CommandContext(t.Context(), "clang-19", "-target", "bpfel", "-O2", "-g", "-mcpu=v3", "-Wall", "-Wextra", "-Werror",
		"-Wno-unused-parameter", "-Wno-sign-compare", "-I/usr/include/x86_64-linux-gnu", "-I/usr/include/aarch64-linux-gnu",
		"-c", filepath.Join("bpf", name+".bpf.c"), "-o", object)
	out, err := clang.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		t.Fatal("clang-19 is missing: run hack/deps generate")
	}
	if err != nil {
		t.Fatalf("compile bpf/%s.bpf.c: %v\n%s", name, err, out)
	}
	spec, err := ebpf.LoadCollectionSpec(object)
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

func load(t testing.TB, name string, spec *ebpf.CollectionSpec) *layout {
	t.Helper()
	collection, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("load the programs of %s: %+v", name, err)
	}
	t.Cleanup(collection.Close)
	return &layout{name, collection}
}

func setConstant(t testing.TB, spec *ebpf.CollectionSpec, name string, value any) {
	t.Helper()
	if err := spec.Variables[name].Set(value); err != nil {
		t.Fatalf("set %s: %v", name, err)
	}
}

// newLRU loads the current layout, with room for so many flows and a ring for a fifth of them.
func newLRU(t testing.TB, spec *ebpf.CollectionSpec, flows uint32) *layout {
	t.Helper()
	spec = spec.Copy()
	spec.Maps["flows"].MaxEntries = 2 * flows
	spec.Maps["unconfirmed"].MaxEntries = flows / 5
	setConstant(t, spec, "ring_length", flows/5)
	return load(t, "lru", spec)
}

// newBuckets loads the layout with one entry a flow, and one of two hashes.
func newBuckets(t testing.TB, spec *ebpf.CollectionSpec, buckets uint32, multiply bool) *layout {
	t.Helper()
	spec = spec.Copy()
	spec.Maps["buckets"].MaxEntries = buckets
	spec.Maps["ports"].MaxEntries = 2 * buckets
	setConstant(t, spec, "bucket_count", buckets)
	setConstant(t, spec, "port_bucket_count", 2*buckets)
	setConstant(t, spec, "key0", rand.Uint64())
	setConstant(t, spec, "key1", rand.Uint64())
	setConstant(t, spec, "multiply", multiply)
	return load(t, map[bool]string{false: "siphash", true: "multiply"}[multiply], spec)
}

// cpus returns the first n CPUs of this process, or skips the test.
func cpus(t testing.TB, n int) (numbers []int) {
	t.Helper()
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; cpu < 64 && len(numbers) < n; cpu++ {
		if set.IsSet(cpu) {
			numbers = append(numbers, cpu)
		}
	}
	if len(numbers) < n {
		t.Skipf("%d CPUs, want %d", len(numbers), n)
	}
	return numbers
}

// packets is what one CPU runs: a program, so often.
type packets struct {
	program string
	run     run
	repeat  int
	others  []byte // memory to write to before the run, so that the caches hold nothing else

	perPacket time.Duration
}

// on runs the packets on a CPU. The counters are in p.run then.
func (l *layout) on(cpu int, p *packets) error {
	key, prog := uint32(cpu), l.Programs[p.program]
	if prog == nil {
		return fmt.Errorf("%s has no program %s", l.name, p.program)
	}
	if err := l.Maps["runs"].Put(key, &p.run); err != nil {
		return err
	}
	_, perPacket, err := prog.Benchmark(make([]byte, 64), p.repeat, func() { _ = l.Maps["runs"].Put(key, &p.run) })
	if err != nil {
		return err
	}
	p.perPacket = perPacket
	return l.Maps["runs"].Lookup(key, &p.run)
}

// atOnce runs packets on several CPUs, each on one of its own.
func (l *layout) atOnce(t testing.TB, numbers []int, all ...*packets) {
	t.Helper()
	var started, done sync.WaitGroup
	started.Add(len(all))
	errs := make([]error, len(all))
	for i, p := range all {
		done.Go(func() {
			runtime.LockOSThread() // the thread ends with the goroutine: its affinity is not another's
			var set unix.CPUSet
			set.Set(numbers[i])
			errs[i] = unix.SchedSetaffinity(0, &set)
			for at := 0; at < len(p.others); at += 64 {
				p.others[at]++
			}
			started.Done()
			started.Wait()
			if errs[i] == nil {
				errs[i] = l.on(numbers[i], p)
			}
		})
	}
	done.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// do runs a program for each of these flows, and ends the test unless it succeeds for all.
func (l *layout) do(t testing.TB, program string, first, flows, flags uint32) {
	t.Helper()
	p := &packets{program: program, run: run{First: first, Flows: flows, Flags: flags, Time: 1000}, repeat: int(flows)}
	l.atOnce(t, cpus(t, 1), p)
	if p.run.Done != uint64(flows) {
		t.Fatalf("%s: %s of %d flows: %+v", l.name, program, flows, p.run)
	}
}
