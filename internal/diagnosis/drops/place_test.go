package drops

import (
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"spillway.dev/spillway/internal/node/conntrack"
)

// A pod makes network namespaces of its own, with the host name and the address of another pod.
func TestAPodDoesNotTakeTheNameOfAnother(t *testing.T) {
	const name, address = "spw-drops-victim", "198.51.100.77"
	victim := newNamespace(t, "victim", "ip addr add "+address+"/32 dev lo")
	defer inPod(t, victim, name)()
	forger := exec.Command("unshare", "--user", "--map-root-user", "--net", "--uts", "sh", "-ec",
		theIP(t)+"ip link set lo up; ip addr add "+address+"/32 dev lo; echo "+name+" >/proc/sys/kernel/hostname; echo ready; exec sleep 60")
	out, err := forger.StdoutPipe()
	if err == nil {
		err = forger.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = forger.Process.Kill()
		_ = forger.Wait()
	}()
	if n, _ := out.Read(make([]byte, 1)); n != 1 {
		t.Skip("no user namespace can be made here")
	}
	list, _ := conntrack.Namespaces()
	theirs := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return n.Is(strconv.Itoa(forger.Process.Pid)) })
	if theirs < 0 {
		t.Fatalf("process %d is in none of %v", forger.Process.Pid, list)
	}
	for _, want := range []string{name, address} {
		pod, err := FindPod(want, list)
		if err != nil || len(pod.Namespaces) != 1 || pod.Namespaces[0].Inode != victim.Inode {
			t.Errorf("%s: %+v, %v", want, pod, err)
		}
	}
	if _, err := FindPod(name, list[theirs:theirs+1]); err == nil {
		t.Error("the forger is found by the name of another pod")
	}
	named := slices.DeleteFunc(Pods(list), func(p Pod) bool { return p.Name != name })
	if len(named) != 1 || named[0].Namespaces[0].Inode != victim.Inode {
		t.Errorf("pods of the name: %+v", named)
	}
}

// In a pod's network namespace, a process with a host name of its own does not rename the pod.
func TestAProcessDoesNotRenameItsPod(t *testing.T) {
	n := newNamespace(t, "renamed", "")
	cmd := exec.Command("ip", "netns", "exec", n.Names[0], "unshare", "--user", "--map-root-user", "--uts", "sh", "-ec",
		"echo spw-drops-another >/proc/sys/kernel/hostname; echo ready; exec sleep 60")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	if n, _ := out.Read(make([]byte, 1)); n != 1 {
		t.Skip("no user namespace can be made here")
	}
	list, _ := conntrack.Namespaces()
	if pod, err := FindPod("spw-drops-another", list); err == nil {
		t.Errorf("%+v", pod)
	}
}

// A pod makes and deletes namespaces and devices without end.
func TestPlacesAreBounded(t *testing.T) {
	p := newPlaces(func() ([]conntrack.Namespace, error) { return nil, nil })
	for i := range uint64(3 * maxPlaces) {
		p.known[i+1] = place{cookie: i + 1}
		p.device(place{cookie: i}, 7)
		if i%maxPlaces == 0 {
			p.refresh()
		}
	}
	p.refresh()
	if len(p.known) > maxPlaces || len(p.devs) > maxPlaces {
		t.Errorf("%d namespaces and %d devices are kept", len(p.known), len(p.devs))
	}
}

// Many namespaces take long to look at, and a pod's drops may always come from a new one.
func TestALongLookIsNotRepeatedSoon(t *testing.T) {
	p, looks := (*places)(nil), 0
	p = newPlaces(func() ([]conntrack.Namespace, error) { looks++; return nil, nil })
	p.looked, p.took = time.Now().Add(-2*refreshInterval), time.Hour
	p.at(99)
	if looks != 1 {
		t.Errorf("%d looks, want one", looks)
	}
	p.took = 0
	if p.at(99); looks != 2 {
		t.Errorf("%d looks, want two", looks)
	}
}
