package privilege

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// podSpec reads the Pod that the chart renders for a file of values of test/deploy.
func podSpec(t *testing.T, name string) corev1.PodSpec {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "deploy", "testdata", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for doc := range bytes.SplitSeq(text, []byte("---\n")) {
		var set appsv1.DaemonSet
		if err := yaml.Unmarshal(doc, &set); err == nil && set.Kind == "DaemonSet" {
			return set.Spec.Template.Spec
		}
	}
	t.Fatalf("no DaemonSet is rendered for %s", name)
	return corev1.PodSpec{}
}

// granted are the capabilities of the chart's agent, sorted.
func granted(t *testing.T, name string) []string {
	t.Helper()
	var list []string
	for _, c := range podSpec(t, name).Containers[0].SecurityContext.Capabilities.Add {
		list = append(list, string(c))
	}
	slices.Sort(list)
	return list
}

// flagsOf returns the chart's arguments that concern capabilities.
func flagsOf(t *testing.T, name string) map[string][]string {
	t.Helper()
	var list []string
	for _, arg := range podSpec(t, name).Containers[0].Args {
		if arg == dropCapabilities || arg == "--end-sockets" {
			list = append(list, arg)
		}
	}
	return map[string][]string{"": list}
}

// mounts reports whether the chart mounts something at a path of the agent's container.
func mounts(t *testing.T, name, path string) bool {
	t.Helper()
	return slices.ContainsFunc(podSpec(t, name).Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == path })
}

const dropCapabilities = "--drop-capabilities"

// TestTheChartGrantsNothingElse checks what no capability covers.
func TestTheChartGrantsNothingElse(t *testing.T) {
	for _, name := range []string{"ebpf", "nftables", "iptables", "beside", "replace", "cleanup", "monitoring", "confined"} {
		pod := podSpec(t, name)
		if pod.HostPID != (name == "replace") { // which takes over from a kube-proxy
			t.Errorf("%s: hostPID is %v", name, pod.HostPID)
		}
		if pod.HostIPC {
			t.Errorf("%s: hostIPC", name)
		}
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			if err := checkContainer(c); err != nil {
				t.Errorf("%s: container %s: %v", name, c.Name, err)
			}
		}
	}
}

// TestTheChartCanDoWithoutSysAdminAndPrivilegedContainers looks at the values for as few
// rights as there are.
func TestTheChartCanDoWithoutSysAdminAndPrivilegedContainers(t *testing.T) {
	if list := granted(t, "confined"); slices.Contains(list, "SYS_ADMIN") {
		t.Errorf("capabilities %v", list)
	}
	pod := podSpec(t, "confined")
	if len(pod.InitContainers) > 0 {
		t.Errorf("%d init containers", len(pod.InitContainers))
	}
	if s := pod.Containers[0].SecurityContext.SeccompProfile; s.Type != corev1.SeccompProfileTypeLocalhost || s.LocalhostProfile == nil {
		t.Errorf("seccomp profile %+v", s)
	}
}

func checkContainer(c corev1.Container) error {
	s := c.SecurityContext
	if s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
		return fmt.Errorf("its root file system is writable")
	}
	if c.Name == "mount-bpffs" {
		return nil // Kubernetes wants it privileged for Bidirectional; it ends before the agent starts
	}
	switch {
	case s.Privileged != nil && *s.Privileged:
		return fmt.Errorf("it is privileged")
	case s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation:
		return fmt.Errorf("it may gain privileges")
	case s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}):
		return fmt.Errorf("it does not drop all capabilities")
	case s.SeccompProfile == nil || s.SeccompProfile.Type == corev1.SeccompProfileTypeUnconfined:
		return fmt.Errorf("it has no seccomp profile")
	}
	return nil
}
