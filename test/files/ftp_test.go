package files

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/flows"
)

// startFTP starts vsftpd on a host with anonymous access.
func (h *files) startFTP(t *testing.T, on string) {
	t.Helper()
	if err := os.MkdirAll("/var/run/vsftpd/empty", 0o755); err != nil {
		t.Fatal(err)
	}
	conf := filepath.Join(t.TempDir(), "vsftpd.conf")
	text := []string{
		"listen=NO", "listen_ipv6=YES", "background=NO", "seccomp_sandbox=NO", "xferlog_enable=NO", "use_localtime=NO",
		"anonymous_enable=YES", "no_anon_password=YES", "ftp_username=daemon", "anon_root=" + filepath.Dir(h.dir),
		"write_enable=YES", "anon_upload_enable=YES", "anon_umask=022", "anon_world_readable_only=NO",
		"pasv_enable=YES", "port_enable=YES", "connect_from_port_20=YES", "secure_chroot_dir=/var/run/vsftpd/empty",
	}
	if err := os.WriteFile(conf, []byte(strings.Join(text, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.Run(t, on, program(t, "vsftpd", "vsftpd"), conf)
	h.WaitListening(t, on, "tcp", 21, true)
}

// ftpClients get and put a file, each in its own way to say where the data go.
var ftpClients = []struct {
	name     string
	v4       bool // it has no other family
	get, put func(server netip.AddrPort, remote, local string) []string
}{
	{"curl EPSV", false, curlGet(), curlPut()},
	{"curl PASV", true, curlGet("--disable-epsv"), curlPut("--disable-epsv")},
	{"curl EPRT", false, curlGet("-P", "-"), curlPut("-P", "-")},
	{"curl PORT", true, curlGet("-P", "-", "--disable-eprt"), curlPut("-P", "-", "--disable-eprt")},
	{"lftp passive", false, lftp("on", "get %[1]s -o %[2]s"), lftp("on", "put %[2]s -o %[1]s")},
	{"lftp active", false, lftp("off", "get %[1]s -o %[2]s"), lftp("off", "put %[2]s -o %[1]s")},
}

func ftpURL(a netip.AddrPort) string {
	return "ftp://" + net.JoinHostPort(a.Addr().String(), port(a)) + "/"
}

func curlGet(options ...string) func(a netip.AddrPort, remote, local string) []string {
	return func(a netip.AddrPort, remote, local string) []string {
		return append(append([]string{"curl", "-sS", "-m", "8", "-o", local}, options...), ftpURL(a)+remote)
	}
}

func curlPut(options ...string) func(a netip.AddrPort, remote, local string) []string {
	return func(a netip.AddrPort, remote, local string) []string {
		return append(append([]string{"curl", "-sS", "-m", "8", "-T", local}, options...), ftpURL(a)+remote)
	}
}

func lftp(passive, command string) func(a netip.AddrPort, remote, local string) []string {
	return func(a netip.AddrPort, remote, local string) []string {
		settings := "set cmd:fail-exit yes; set net:max-retries 1; set net:timeout 4; set xfer:clobber yes; set ftp:passive-mode " + passive +
			"; "
		return []string{"lftp", "-c", settings + "open " + ftpURL(a) + "; " + fmt.Sprintf(command, remote, local)}
	}
}

// ftpWays are from where and by which address; the server is on node a.
var ftpWays = []flows.Flow{
	{From: "client0", To: flows.NodePort("a")},
	{From: "client1", To: flows.NodePort("b")},
	{From: "b0", To: flows.ClusterIP},
	{From: "b1/vm", To: flows.ClusterIP},
	{From: "a1", To: flows.ClusterIP},
	{From: "b", To: flows.ClusterIP},
	{From: "a", To: flows.ClusterIP},
}

func TestFTPFilesArriveWhole(t *testing.T) {
	r := start(t, "files-ftp")
	r.startFTP(t, "a0")
	s := r.Load(t, service("ftp", corev1.ProtocolTCP, 21, "a0"))
	const size = 100_000
	r.offer(t, "file", size)
	var wg sync.WaitGroup
	for i, way := range ftpWays {
		wg.Go(func() {
			for k, combo := range flows.TCP {
				addr := address(t, s, way.To, combo)
				for j, c := range ftpClients {
					// With -short: active and passive by every way, and every client by some.
					if c.v4 && combo.IPv6() || testing.Short() && (i+j/2+k)%2 > 0 {
						continue
					}
					what := fmt.Sprintf("%s at %s from %s", c.name, addr, way.From)
					unique := plain.Replace(fmt.Sprintf("%s-%s-%s", strings.ReplaceAll(c.name, " ", ""), way.From, addr.Addr()))
					local := filepath.Join(r.out, unique)
					if out, err := r.client(t.Context(), way.From, c.get(addr, pub+"/file", local)...); err != nil {
						t.Errorf("get by %s: %v: %s", what, err, out)
					} else {
						want(t, "get by "+what, local, "file", size)
					}
					if err := os.WriteFile(local, content(unique, size), 0o644); err != nil {
						t.Error(err)
					}
					if out, err := r.client(t.Context(), way.From, c.put(addr, pub+"/"+unique, local)...); err != nil {
						t.Errorf("put by %s: %v: %s", what, err, out)
					} else {
						want(t, "put by "+what, filepath.Join(r.dir, unique), unique, size)
					}
				}
			}
		})
	}
	wg.Wait()
}
