package files

import (
	"fmt"
	"testing"

	"spillway.dev/spillway/test/flows"
)

// TestLargeTFTPFiles reads files of many blocks, larger ones than go into a packet
// of IPv6 among them, several on their way at once. -short leaves out 100 MB.
func TestLargeTFTPFiles(t *testing.T) {
	r := start(t, "files-large")
	s := r.startTFTP(t)
	sizes := []int{5_000_000}
	if !testing.Short() {
		sizes = append(sizes, 100_000_000)
	}
	// RFC 2348 and 7440: both servers know the one, atftpd the other.
	large := map[string][]string{
		"atftp": {"--option", "blksize 1468", "--option", "windowsize 16"},
		"curl":  {"--tftp-blksize", "1468"},
	}
	for _, size := range sizes {
		r.offer(t, fmt.Sprint("f", size), size)
		for _, x := range []struct {
			server string
			client tftpClient
			combo  flows.Combo
		}{
			{"atftpd", tftpClients[1], flows.UDP4},
			{"tftpd-hpa", tftpClients[2], flows.UDP4},
			{"tftpd-hpa", tftpClients[2], flows.UDP6},
		} {
			for _, node := range []string{"a", "b"} {
				addr := address(t, s, flows.NodePort(node).Of(x.server), x.combo)
				r.get(t, "client0", x.server, x.client, addr, size, large[x.client.name]...)
			}
		}
	}
}
