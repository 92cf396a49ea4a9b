package doctor

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/node/kernel"
)

// mounts are lines of /proc/1/mountinfo as a kubelet's node has them. The machines that run
// these tests have no NFS client.
const mounts = `24 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
401 24 0:52 / /var/lib/kubelet/pods/6f1c/volumes/kubernetes.io~nfs/data rw,relatime shared:201 - nfs4 10.96.0.20:/ rw,vers=4.2,rsize=1048576,hard,proto=tcp,timeo=600,clientaddr=172.30.0.10,local_lock=none,addr=10.96.0.20
402 24 0:53 / /mnt/old\040data rw,relatime shared:202 - nfs 192.0.2.1:/srv rw,vers=3,port=20049,mountaddr=192.0.2.1,addr=192.0.2.1
403 24 0:54 / /mnt/six rw shared:203 - nfs4 [fd96::14]:/ rw,vers=4.2,port=0,proto=tcp6,addr=fd96::14
404 24 0:55 / /mnt/odd rw shared:204 - nfs4 x:/ rw,addr=nowhere
`

func TestNFSMounts(t *testing.T) {
	got, err := nfsMounts(strings.NewReader(mounts))
	want := []NFSMount{
		{netip.MustParseAddrPort("10.96.0.20:2049"), "/var/lib/kubelet/pods/6f1c/volumes/kubernetes.io~nfs/data"},
		{netip.MustParseAddrPort("192.0.2.1:20049"), "/mnt/old data"},
		{netip.MustParseAddrPort("[fd96::14]:2049"), "/mnt/six"},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("mounts %v, %v, want %v", got, err, want)
	}
	if _, err := nfsMounts(strings.NewReader("odd\n")); err == nil {
		t.Error("an odd line is no error")
	}
}

func TestNFSWithSocketHooks(t *testing.T) {
	old, mount := kernel.Version{Major: 6, Minor: 1, Patch: 20}, NFSMount{netip.MustParseAddrPort("10.96.0.20:2049"), "/mnt/a"}
	for _, c := range []struct {
		what   string
		node   Node
		titles int
	}{
		{"no mount", Node{Kernel: old}, 0},
		{"a new kernel", Node{Kernel: kernel.Version{Major: 6, Minor: 6}, NFS: []NFSMount{mount}}, 0},
		{"an old kernel", Node{Kernel: old, NFS: []NFSMount{mount, mount, mount, mount}}, 1},
	} {
		found := Examine(&c.node, "nfs-with-socket-hooks")
		if len(found) != c.titles {
			t.Errorf("%s: found %+v", c.what, found)
		}
		for _, f := range found {
			if !slices.Contains(f.Evidence, "and 1 more") || !slices.Contains(f.Evidence, "/mnt/a is mounted from 10.96.0.20:2049, a Service") {
				t.Errorf("%s: evidence %q", c.what, f.Evidence)
			}
		}
	}
}
