package iptables

import (
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
)

func quiet() Config { return Config{Log: slog.New(slog.NewTextHandler(io.Discard, nil))} }

func TestTheVariantThatTheNodeUsesIsChosen(t *testing.T) {
	rules := "*filter\n-A FORWARD -s 192.0.2.77/32 -j DROP\nCOMMIT\n"
	kubelet := "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n"
	for _, test := range []struct {
		name        string
		legacy, nft string
		want        Variant
		why         string
	}{
		{"nothing anywhere", "", "", NFT, "legacy has 0 and nft 0; nft copies no table"},
		{"rules in legacy", rules, "", Legacy, "legacy has 1 and nft 0"},
		{"rules in nft", "", rules, NFT, "legacy has 0 and nft 1"},
		{"more rules in legacy, but kubelet in nft", rules, kubelet, NFT, "kubelet"},
		{"more rules in nft, but kubelet in legacy", kubelet, rules, Legacy, "kubelet"},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t)
			for v, text := range map[Variant]string{Legacy: test.legacy, NFT: test.nft} {
				if b.variant = v; text != "" {
					b.must(text)
				}
			}
			b.variant = test.want
			b.open()
			if !strings.Contains(b.log.String(), test.why) {
				t.Errorf("the log says %s, want %q", b.log, test.why)
			}
		})
	}
}

func TestRulesOfAnEarlierRunWithTheOtherVariantAreRemoved(t *testing.T) {
	b := newBench(t)
	b.variant = NFT
	b.replace(b.open(), service(1))
	b.use(Legacy) // the node uses the other variant now
	be := b.open()
	b.variant = NFT
	if dump := b.dump(); !strings.Contains(dump, "10.96.0.1/32") {
		t.Errorf("no variant serves until the first sync; nft holds\n%s", dump)
	}
	b.variant = Legacy
	b.replace(be, service(1))
	b.variant = NFT
	if dump := b.dump(); strings.Contains(dump, chainPrefix) {
		t.Errorf("nft still holds\n%s", dump)
	}
	b.variant = Legacy
	b.asFromScratch(intent.State{Node: testNode(), Ports: []*intent.ServicePort{service(1)}})
}

func TestOwnRulesDoNotCountForTheChoice(t *testing.T) {
	b := newBench(t)
	b.use(Legacy)
	b.replace(b.open(), service(1))
	b.must("*mangle\n-X KUBE-KUBELET-CANARY\nCOMMIT\n")
	b.variant = Legacy
	b.open()
	if !strings.Contains(b.log.String(), "an earlier run used it") {
		t.Errorf("the log says %s", b.log)
	}
	b.variant = NFT
	b.must("*filter\n-A FORWARD -s 192.0.2.77/32 -j DROP\nCOMMIT\n")
	b.open()
}

// fakePrograms puts programs that only print a version into an otherwise empty PATH.
func fakePrograms(t *testing.T, version string) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if version == "" {
		return
	}
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, v := range variants {
			for _, what := range []string{"save", "restore"} {
				text := "#!/bin/sh\necho \"" + base + "-" + what + " " + version + " (" + string(v) + ")\"\n"
				if err := os.WriteFile(filepath.Join(dir, base+"-"+string(v)+"-"+what), []byte(text), 0o755); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

func TestMissingAndOldProgramsAreNamedInOneLine(t *testing.T) {
	for version, want := range map[string]string{
		"":       "install the package iptables, or use another --proxy-mode",
		"v1.6.1": "is too old (iptables-restore v1.6.1 (nft)): 1.6.2 is needed",
		"v1":     "is too old",
	} {
		t.Run("version "+version, func(t *testing.T) {
			b := newBench(t)
			fakePrograms(t, version)
			_, err := New(context.Background(), b.cfg)
			if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("the error is %v, want %q", err, want)
			}
			if err := Cleanup(context.Background(), b.cfg); err != nil {
				t.Errorf("there is nothing to clean up, but: %v", err)
			}
		})
	}
}

// Without a capability, programs complain about a table, as they do about a missing module.
func TestAMissingCapabilityIsNamed(t *testing.T) {
	for name, capability := range map[string]uint{"CAP_NET_ADMIN": unix.CAP_NET_ADMIN, "CAP_NET_RAW": unix.CAP_NET_RAW} {
		b := newBench(t)
		b.use(Legacy)
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3} // of this thread
		var data [2]unix.CapUserData
		if err := unix.Capget(&header, &data[0]); err != nil {
			t.Fatal(err)
		}
		all := data
		data[capability/32].Effective &^= 1 << (capability % 32)
		if err := unix.Capset(&header, &data[0]); err != nil {
			t.Fatal(err)
		}
		_, err := New(context.Background(), b.cfg)
		if err := unix.Capset(&header, &all[0]); err != nil {
			t.Fatal(err)
		}
		if err == nil || !strings.Contains(err.Error(), " needs "+name+", which this process lacks: ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

func TestAKernelWithoutANeededFeatureIsNamed(t *testing.T) {
	b := newBench(t)
	b.use(Legacy)
	p, err := findPrograms(context.Background(), &b.cfg, Legacy, 4)
	if err != nil {
		t.Fatal(err)
	}
	// Table nat refuses REJECT. For this rule the kernel behaves as if it was built
	// without it.
	bad := feature{name: "telepathy", table: tableNAT, rule: "-j REJECT --reject-with icmp-port-unreachable", need: true}
	if err := tryRules(context.Background(), p, []feature{bad}); err == nil {
		t.Error("the kernel takes it")
	}
	if dump := b.dump(); strings.Contains(dump, chainTry) {
		t.Errorf("left over:\n%s", dump)
	}
}

func TestConfig(t *testing.T) {
	for _, test := range []struct {
		cfg  Config
		want string
	}{
		{Config{}, "no logger"},
		{Config{Log: slog.Default(), VerifyPartialSync: "often"}, `"often": not a choice: use off, sampled, always`},
		{Config{Log: slog.Default(), VerifyPartialSync: VerifyAlways}, ""},
	} {
		err := test.cfg.Validate()
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("the error of %+v is %v, want %q", test.cfg, err, test.want)
		}
	}
}
