package buckets

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// BenchmarkAlternatives prints what single steps take, without what an empty program takes: locks of
// a bucket without contention, and reads of a bucket in an array and in an arena, apart.
//
//	go -C hack test ./buckets -run '^$' -bench Alternatives -benchtime 20x -v
func BenchmarkAlternatives(b *testing.B) {
	const buckets, bucketSize = 20480, 1088
	steps := []struct {
		layout *layout
		names  []string
	}{
		{load(b, "locks", compile(b, "locks")), []string{"no_lock", "compare_and_swap", "spin_lock", "array"}},
		{nil, []string{"arena_read"}},
	}
	if arena := loadArena(b, buckets*bucketSize); arena != nil {
		steps[1].layout = arena
	} else {
		steps = steps[:1]
	}
	ns := make(map[string][]float64)
	number := cpus(b, 1)
	round := uint64(0)
	for b.Loop() {
		for _, s := range steps {
			for _, name := range s.names {
				round++
				work := run{Flows: buckets * ways, Flags: runRandom, Next: round << 32}
				p, e := &packets{program: name, run: work, repeat: batch}, &packets{program: "empty", run: work, repeat: batch}
				s.layout.atOnce(b, number, p)
				s.layout.atOnce(b, number, e)
				if p.run.Done != batch {
					b.Fatalf("%s: %+v", name, p.run)
				}
				ns[name] = append(ns[name], float64(p.perPacket-e.perPacket))
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	for _, s := range steps {
		for _, name := range s.names {
			b.Logf("%-18s %s ns", name, spread(ns[name], "%.0f"))
		}
	}
}

// loadArena loads bpf/arena.bpf.c and touches all pages of its arena. It returns nil before Linux 6.9.
func loadArena(b *testing.B, size int) *layout {
	b.Helper()
	spec := compile(b, "arena")
	spec.Maps["arena"].MapExtra = 1 << 44 // where user space maps it: the lower half of the address is 0
	program := spec.Programs["arena_read"]
	delete(spec.Programs, "arena_read")
	collection, err := ebpf.NewCollection(spec)
	if err != nil {
		b.Logf("no arena: %v", err)
		return nil
	}
	b.Cleanup(collection.Close)
	memory, err := unix.MmapPtr(collection.Maps["arena"].FD(), 0, unsafe.Add(nil, 1<<44), uintptr(size),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		b.Fatalf("map the arena: %v", err)
	}
	b.Cleanup(func() { _ = unix.MunmapPtr(memory, uintptr(size)) })
	for i := 0; i < size; i += 4096 {
		*(*byte)(unsafe.Add(memory, i)) = 1
	}
	collection.Programs["arena_read"] = loadRaw(b, program.Instructions, collection.Maps)
	return &layout{"arena", collection}
}

// loadRaw loads a tc program without the library, which writes 0 where addr_space_cast has 1
// (cilium/ebpf 0.22, Instruction.Marshal).
func loadRaw(b *testing.B, instructions asm.Instructions, maps map[string]*ebpf.Map) *ebpf.Program {
	b.Helper()
	for i := range instructions {
		if name := instructions[i].Reference(); maps[name] != nil {
			if err := instructions[i].AssociateMap(maps[name]); err != nil {
				b.Fatal(err)
			}
		}
	}
	var code bytes.Buffer
	if err := instructions.Marshal(&code, binary.LittleEndian); err != nil {
		b.Fatal(err)
	}
	raw := code.Bytes()
	for at := 0; at < len(raw); at += asm.InstructionSize {
		const move, castToKernel = 0xbf, 1
		if raw[at] == move && binary.LittleEndian.Uint32(raw[at+4:]) == castToKernel {
			binary.LittleEndian.PutUint16(raw[at+2:], 1)
		}
	}
	license, log := []byte("GPL\x00"), make([]byte, 1<<16)
	attr := struct {
		kind, count      uint32
		code, license    uint64
		logLevel, logLen uint32
		log              uint64
		pad              [96]byte
	}{kind: uint32(ebpf.SchedCLS), count: uint32(len(raw) / asm.InstructionSize), code: uint64(uintptr(unsafe.Pointer(&raw[0]))),
		license: uint64(uintptr(unsafe.Pointer(&license[0]))), logLevel: 1, logLen: uint32(len(log)),
		log: uint64(uintptr(unsafe.Pointer(&log[0])))}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(raw)
	runtime.KeepAlive(license)
	if errno != 0 {
		b.Fatalf("load arena_read: %v\n%s", errno, bytes.TrimRight(log, "\x00"))
	}
	program, err := ebpf.NewProgramFromFD(int(fd))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { program.Close() })
	return program
}
