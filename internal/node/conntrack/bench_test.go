package conntrack

import (
	"bytes"
	"io"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// benchEntries fits the table of a machine as the kernel sizes it.
const benchEntries = 200_000

// plantMany fills the table of the current namespace with UDP entries, one in a
// hundred to 10.96.0.10:53.
func plantMany(b *testing.B, c *Conn, n int) {
	b.Helper()
	any := netip.MustParseAddrPort("10.96.0.11:53")
	one := netip.MustParseAddrPort("10.96.0.10:53")
	for i := range n {
		dst := any
		if i%100 == 0 {
			dst = one
		}
		src := netip.AddrPortFrom(netip.AddrFrom4([4]byte{172, 16, byte(i >> 16), byte(i >> 8)}), uint16(1024+i&0xff))
		e := Entry{Orig: Tuple{Src: src, Dst: dst}, Reply: Tuple{Src: dst, Dst: src}, Protocol: unix.IPPROTO_UDP, Timeout: 10 * time.Minute}
		if _, err := c.Add(&e); err != nil {
			b.Fatalf("plant entry %d: %v", i, err)
		}
	}
}

func BenchmarkDump(b *testing.B) {
	netnstest.Enter(b)
	c := open(b)
	plantMany(b, c, benchEntries)
	for _, row := range []struct {
		name   string
		filter Filter
		want   int
	}{
		{"all", Filter{}, benchEntries},
		{"oneDestination", Filter{Protocol: unix.IPPROTO_UDP, OrigDst: netip.MustParseAddrPort("10.96.0.10:53")}, benchEntries / 100},
		{"translated", Filter{Protocol: unix.IPPROTO_UDP, Status: DstNAT}, 0},
	} {
		b.Run(row.name, func(b *testing.B) {
			b.ReportAllocs()
			var peak runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&peak)
			base, top := peak.HeapInuse, uint64(0)
			for b.Loop() {
				n := 0
				err := c.Dump(b.Context(), row.filter, func(*Entry) bool {
					if n++; n%20_000 == 0 {
						runtime.ReadMemStats(&peak)
						top = max(top, peak.HeapInuse)
					}
					return true
				})
				if err != nil || n != row.want {
					b.Fatalf("%d entries, want %d: %v", n, row.want, err)
				}
			}
			b.ReportMetric(float64(max(top, base)-base)/1e6, "MB-above")
			b.ReportMetric(float64(benchEntries)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mentries/s")
		})
	}
}

// Measures reading a table of a million entries. It raises the machine's limit meanwhile,
// and restores it.
func BenchmarkDumpMillion(b *testing.B) {
	const entries = 1_000_000
	raiseLimit(b, 2*entries)
	netnstest.Enter(b)
	c := open(b)
	plantMany(b, c, entries)
	b.ReportAllocs()
	var memory runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&memory)
	base, top := memory.Sys, uint64(0)
	for b.Loop() {
		n := 0
		if err := c.Dump(b.Context(), Filter{}, func(*Entry) bool { n++; return true }); err != nil || n != entries {
			b.Fatalf("%d entries: %v", n, err)
		}
		runtime.ReadMemStats(&memory)
		top = max(top, memory.Sys)
	}
	// Sys includes all memory that the process got from the kernel, so it includes the
	// peak.
	b.ReportMetric(float64(top-base)/(1<<20), "MiB-above")
}

// raiseLimit raises the maximum size of tables until the benchmark ends. The file stays
// open: later the thread is in a namespace where it is read-only.
func raiseLimit(b *testing.B, limit int) {
	b.Helper()
	f, err := os.OpenFile("/proc/sys/net/netfilter/nf_conntrack_max", os.O_RDWR, 0)
	if err != nil {
		b.Fatal(err)
	}
	found := make([]byte, 32)
	n, err := f.ReadAt(found, 0)
	if err != nil && err != io.EOF {
		b.Fatal(err)
	}
	found = bytes.TrimSpace(found[:n])
	most, err := strconv.Atoi(string(found))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		defer f.Close()
		if _, err := f.WriteAt(found, 0); err != nil {
			b.Errorf("restore nf_conntrack_max to %s: %v", found, err)
		}
	})
	if most < limit {
		if _, err := f.WriteAt([]byte(strconv.Itoa(limit)), 0); err != nil {
			b.Fatal(err)
		}
	}
}

// Measures one page of top, over all namespaces of the machine.
func BenchmarkReadNamespace(b *testing.B) {
	list, _ := Namespaces()
	b.ReportMetric(float64(len(list)), "namespaces")
	for b.Loop() {
		if _, err := readReport(b.Context(), list[0]); err != nil {
			b.Fatal(err)
		}
	}
}
