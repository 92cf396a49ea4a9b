package flood

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/lab/experiment"
)

// TestRenew: each SYN has another source, and right checksums.
func TestRenew(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	frame, err := synFrame(mac, mac, netip.MustParseAddrPort("172.30.0.10:30080"))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	const count = 1000
	for n := range uint32(count) {
		renew(frame, n*7919)
		p := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.Default)
		ip, tcp := p.Layer(layers.LayerTypeIPv4).(*layers.IPv4), p.Layer(layers.LayerTypeTCP).(*layers.TCP)
		seen[ip.SrcIP.String()+tcp.SrcPort.String()] = true
		if err := tcp.SetNetworkLayerForChecksum(ip); err != nil {
			t.Fatal(err)
		}
		if err, bad := p.VerifyChecksums(); err != nil || len(bad) > 0 {
			t.Fatalf("frame %d: %v, %d wrong checksums", n, err, len(bad))
		}
		if !netip.MustParsePrefix("198.18.0.0/15").Contains(netip.AddrFrom4([4]byte(ip.SrcIP.To4()))) {
			t.Fatalf("frame %d is from %s", n, ip.SrcIP)
		}
	}
	if len(seen) != count {
		t.Errorf("%d frames have %d sources", count, len(seen))
	}
}

func TestReportFitsTheTerminal(t *testing.T) {
	r := &Report{Seconds: 10, Clients: 16, Machine: experiment.Machine{Kernel: "6.18.0", Arch: "amd64", CPU: "CPU", Cores: 2}}
	v := probes{tried: 12345, took: slices.Repeat([]time.Duration{999 * time.Millisecond}, 11111)}
	for _, m := range Modes {
		r.Rows = append(r.Rows, newRow(m, "elsewhere", 234567, v, v, 262144))
	}
	clitest.Pages(t, "report", r)
}

func TestValidate(t *testing.T) {
	good := Config{Modes: []string{"ebpf"}, Duration: time.Second, Clients: 1}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for name, spoil := range map[string]func(*Config){
		"unknown mode": func(c *Config) { c.Modes = []string{"ipvs"} },
		"mode twice":   func(c *Config) { c.Modes = []string{"ebpf", "ebpf"} },
		"no mode":      func(c *Config) { c.Modes = nil },
		"rate":         func(c *Config) { c.Rate = -1 },
		"duration":     func(c *Config) { c.Duration = time.Millisecond },
		"clients":      func(c *Config) { c.Clients = 0 },
	} {
		c := good
		spoil(&c)
		if c.Validate() == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}
