package files

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/suite"
)

// tftpServers start one on a host.
var tftpServers = []struct {
	name     string
	on       string
	families string // as flows.Service.Families
	write    bool   // it takes files
	start    func(t *testing.T, r *files, on string)
}{
	{"tftpd-hpa", "a0", "", true, func(t *testing.T, r *files, on string) {
		r.Run(t, on, program(t, "in.tftpd", "tftpd-hpa"), "--foreground", "--listen", "--create", "--permissive", "--secure", r.dir)
	}},
	// As a daemon, 0.8.0 speaks IPv4 alone.
	{"atftpd", "a1", "4", true, func(t *testing.T, r *files, on string) {
		r.Run(t, on, program(t, "atftpd", "atftpd"), "--daemon", "--no-fork", "--user", "nobody.nogroup", "--logfile", "-", r.dir)
	}},
	{"dnsmasq", "a2", "", false, func(t *testing.T, r *files, on string) {
		r.Run(t, on, program(t, "dnsmasq", "dnsmasq-base"), "--keep-in-foreground", "--port=0", "--enable-tftp", "--tftp-root="+r.dir,
			"--user=root", "--conf-file=/dev/null", "--pid-file=", "--log-facility=-", "--bind-interfaces")
	}},
}

// startTFTP starts every server, and a Service in front of each.
func (h *files) startTFTP(t *testing.T) *suite.File {
	t.Helper()
	var objects []flows.Object
	for _, s := range tftpServers {
		s.start(t, h, s.on)
		o := service(s.name, corev1.ProtocolUDP, 69, s.on)
		o.Families = s.families
		objects = append(objects, o)
	}
	for _, s := range tftpServers {
		h.WaitListening(t, s.on, "udp", 69, s.families == "")
	}
	return h.Load(t, objects...)
}

// ways are from where and by which address. All servers are on node a.
var ways = []flows.Flow{
	{From: "client0", To: flows.NodePort("a")}, // the endpoint is on the node that is asked
	{From: "client0", To: flows.NodePort("b")}, // on another
	{From: "b0", To: flows.ClusterIP},
	{From: "b1/vm", To: flows.ClusterIP}, // no socket hook sees it
	{From: "b", To: flows.ClusterIP},
	{From: "a", To: flows.ClusterIP},
	{From: "b2", To: flows.NodePort("b")},
}

// The sizes around a block of 512 bytes, and one of several.
var sizes = []int{0, 511, 512, 513, 5120}

func TestTFTPFilesArriveWhole(t *testing.T) {
	r := start(t, "files-tftp")
	s := r.startTFTP(t)
	for _, size := range sizes {
		r.offer(t, fmt.Sprint("f", size), size)
	}
	var wg sync.WaitGroup
	for i, way := range ways {
		wg.Go(func() { // each from a host of its own, all at once
			for j, server := range tftpServers {
				for k, combo := range flows.UDP {
					if combo.IPv6() && server.families != "" {
						continue
					}
					// Every client by every way and to every server, and every pair often.
					client := tftpClients[(i+j+k)%len(tftpClients)]
					addr := address(t, s, way.To.Of(server.name), combo)
					for _, size := range sizes {
						if size == 0 && client.name == "curl" {
							continue // 7.88 ends with an error of its own when it has got nothing
						}
						r.get(t, way.From, server.name, client, addr, size)
						if server.write && size > 0 {
							r.put(t, way.From, server.name, client, addr, size)
						}
					}
				}
			}
		})
	}
	wg.Wait()
}

func describe(from, server string, c tftpClient, a netip.AddrPort, size int, verb string) string {
	return fmt.Sprintf("%s %s %d bytes from %s at %s (%s)", c.name, verb, size, server, a, from)
}

// plain makes a file's name of what has slashes and colons.
var plain = strings.NewReplacer("/", "-", ":", "-")

func (h *files) get(t *testing.T, from, server string, c tftpClient, a netip.AddrPort, size int, options ...string) bool {
	t.Helper()
	name, what := fmt.Sprint("f", size), describe(from, server, c, a, size, "gets")
	local := filepath.Join(h.out, plain.Replace(fmt.Sprintf("g-%s-%s-%s-%d", from, server, a.Addr(), size)))
	if out, err := h.client(t.Context(), from, c.get(a, name, local, options...)...); err != nil {
		t.Errorf("%s: %v: %s", what, err, out)
		return false
	}
	return want(t, what, local, name, size)
}

func (h *files) put(t *testing.T, from, server string, c tftpClient, a netip.AddrPort, size int, options ...string) bool {
	t.Helper()
	what := describe(from, server, c, a, size, "puts")
	name := plain.Replace(fmt.Sprintf("p-%s-%s-%s-%d", from, server, a.Addr(), size))
	local := filepath.Join(h.out, name)
	if err := os.WriteFile(local, content(name, size), 0o644); err != nil {
		t.Error(err)
		return false
	}
	defer os.Remove(local)
	if out, err := h.client(t.Context(), from, c.put(a, name, local, options...)...); err != nil {
		t.Errorf("%s: %v: %s", what, err, out)
		return false
	}
	return want(t, what, filepath.Join(h.dir, name), name, size)
}
