package objects

import (
	"errors"
	"fmt"
	"math/bits"
	"sort"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
)

// Bounds of the sizes that Fit chooses.
const (
	minFittedFlows     = 1 << 14
	minFittedEndpoints = 1 << 16
	flowsStep          = 1 << 10
	// serviceShare is the part of the memory that the buckets of Service maps may take.
	serviceShare = 4
)

// setSizes sets the sizes of the maps of an object.
func setSizes(spec *ebpf.CollectionSpec, cfg *Config) {
	for name, size := range map[string]uint32{
		TCMapFlows:        2 * (cfg.FlowTableSize + cfg.unconfirmed()),
		TCMapUnconfirmed:  cfg.unconfirmed() + cfg.DSRFlows(),
		TCMapFrontends:    cfg.MaxFrontends + cfg.MaxEndpoints,
		TCMapServices:     cfg.MaxFrontends,
		TCMapBackends:     cfg.MaxEndpoints,
		TCMapSlots:        slotsOf * cfg.MaxEndpoints,
		TCMapSourceRanges: orDefault(cfg.MaxSourceRanges, DefaultMaxSourceRanges),
		TCMapPortFilter:   cfg.filterWords(),

		TCMapEvents:            cfg.eventsSize(),
		TCMapHandshakes:        cfg.handshakes(),
		TCMapFlowBytes:         cfg.countedFlows(),
		TCMapLoads:             cfg.loads(),
		TCMapDsrPaths:          cfg.dsrPaths(),
		TCMapDsrEncapsulations: cfg.dsrPaths(),
		TCMapSynProofs:         cfg.synProofs(),
	} {
		if m := spec.Maps[name]; m != nil {
			m.MaxEntries = size
		}
	}
}

// Fit sets the sizes that are 0 so that the maps take at most so many bytes of kernel memory at
// load. Maps of Services get a quarter of it at most, and the flow table what is left, up to
// flows. None gets less than a small node needs, even if that is more memory. Fit returns the bytes
// that they take.
func (c *Config) Fit(memory uint64, flows uint32) (bytes uint64, err error) {
	tc, err := LoadTC()
	if err != nil {
		return 0, fmt.Errorf("read eBPF objects: %w", err)
	}
	c.fit(tc, memory, flows)
	return c.memory(tc), nil
}

func (c *Config) fit(tc *ebpf.CollectionSpec, memory uint64, flows uint32) {
	if c.MaxEndpoints == 0 {
		least := *c
		least.FlowTableSize = orDefault(c.FlowTableSize, min(flows, minFittedFlows))
		least.setEndpoints(DefaultMaxEndpoints)
		for least.MaxEndpoints > minFittedEndpoints && (least.serviceMemory(tc) > memory/serviceShare || least.memory(tc) > memory) {
			least.setEndpoints(least.MaxEndpoints / 2)
		}
		c.setEndpoints(least.MaxEndpoints)
	}
	if c.FlowTableSize > 0 {
		return
	}
	c.FlowTableSize = flows
	if flows <= minFittedFlows || c.memory(tc) <= memory {
		return
	}
	steps := sort.Search(int(flows/flowsStep), func(n int) bool {
		c.FlowTableSize = uint32(n+1) * flowsStep
		return c.memory(tc) > memory
	})
	c.FlowTableSize = max(uint32(steps)*flowsStep, minFittedFlows)
}

// setEndpoints sets the sizes of the Service maps.
func (c *Config) setEndpoints(n uint32) {
	c.MaxEndpoints, c.MaxFrontends = n, n/(DefaultMaxEndpoints/DefaultMaxFrontends)
}

// serviceMemory returns the kernel memory of the Service maps at load, in bytes.
func (c *Config) serviceMemory(tc *ebpf.CollectionSpec) (bytes uint64) {
	setSizes(tc, c)
	for _, name := range append([]string{TCMapPortFilter}, PortMaps...) {
		bytes += bytesAtLoad(tc.Maps[name])
	}
	return bytes
}

// Memory returns the kernel memory in bytes that the maps take when they are created. The entries
// of Services take more, as they are written.
func (c *Config) Memory() (uint64, error) {
	tc, err := LoadTC()
	if err != nil {
		return 0, fmt.Errorf("read eBPF objects: %w", err)
	}
	return c.memory(tc), nil
}

// memory needs the object of the tc programs alone: it has all maps.
func (c *Config) memory(tc *ebpf.CollectionSpec) (bytes uint64) {
	setSizes(tc, c)
	for _, m := range tc.Maps {
		bytes += bytesAtLoad(m)
	}
	return bytes
}

// bytesAtLoad returns the kernel memory of a new map in bytes, as map_mem_usage of its type computes
// it (kernel/bpf, Linux 6.4), without some hundred bytes for each map.
func bytesAtLoad(m *ebpf.MapSpec) uint64 {
	const element, bucket = 48, 16 // struct htab_elem and struct bucket
	key, value, n := uint64(m.KeySize+7)/8*8, uint64(m.ValueSize+7)/8*8, uint64(m.MaxEntries)
	buckets := bucket * (uint64(1) << bits.Len64(max(n, 1)-1))
	switch m.Type {
	case ebpf.LRUHash:
		return n*(element+key+value) + buckets
	case ebpf.Hash, ebpf.PerCPUHash:
		return buckets // the maps here allocate elements as they are written
	case ebpf.Array:
		return n * value
	case ebpf.PerCPUArray:
		return n * value * uint64(ebpf.MustPossibleCPU())
	case ebpf.RingBuf:
		return n
	}
	return 0
}

// withMemory adds to ENOMEM how much memory the maps need, and how much there may be.
func (c *Config) withMemory(err error) error {
	need, unknown := c.Memory()
	if !errors.Is(err, unix.ENOMEM) || unknown != nil {
		return err
	}
	limit := "no memory limit of this process is known: "
	if bytes, file := kernel.MemoryLimit(); bytes > 0 {
		limit = fmt.Sprintf("the memory limit is %d MiB (%s): raise it, or ", bytes>>20, file)
	}
	return fmt.Errorf("%w: the maps need %d MiB, the flow table of %d flows among them; %sgive smaller --conntrack-max-per-core and "+
		"--conntrack-min",
		err, need>>20, c.FlowTableSize, limit)
}
