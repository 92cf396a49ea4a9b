package sysdump

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func TestSecretsAreRedacted(t *testing.T) {
	r := NewRedactor("known-value", "short")
	for _, row := range []struct{ text, want string }{
		{"a known-value in a line", "a REDACTED in a line"},
		{"short", "short"},
		{"get http://user:PLANT@host:8086/write?db=x", "get http://REDACTED@host:8086/write?db=x"},
		{"get http://user:PL/A#NT@host/", "get http://REDACTED@host/"},
		{"https://PLANT@host", "https://REDACTED@host"},
		{"http://host:80/path", "http://host:80/path"},
		{"Authorization: Bearer PLANT.abc", "Authorization: REDACTED"},
		{`{"Authorization":["Basic UExBTlQ="]}`, `{"Authorization":["REDACTED"]}`},
		{"curl with bearer PLANT12345", "curl with bearer REDACTED"},
		{"Token PLANT12345==", "Token REDACTED"},
		{"jwt eyJhbGciOiJSUzI1NiJ9.eyJQTEFOVCI6MX0.c2ln-_", "jwt REDACTED"},
		{"-----BEGIN EC PRIVATE KEY-----\nPLANT\nPLANT\n-----END EC PRIVATE KEY-----\nnext", "REDACTED\nnext"},
		{`{"key":"-----BEGIN PRIVATE KEY-----\nPLANT\n-----END PRIVATE KEY-----\n"}`, `{"key":"REDACTED\n"}`},
		{"PLANT\nPLANT\n-----END PRIVATE KEY-----\nnext", "REDACTED\nnext"},
		{"first\n-----BEGIN PRIVATE KEY-----\nPLANT", "first\nREDACTED"},
		{"client-key-data: LS0tLS1CRUdJTiBQTEFOVA==", "client-key-data: REDACTED"},
		{"x LS0tLS1CRUdJTiBQTEFOVA== y", "x REDACTED y"},
		{"password=PLANT next", "password=REDACTED next"},
		{"db_Password: PLANT", "db_Password: REDACTED"},
		{"password: |\n  PLANT\n  PLANT\nnext: x\n", "password: |\n  REDACTED\nnext: x\n"},
		{`{"apiKey": "PL\"ANT", "port": 80}`, `{"apiKey": "REDACTED", "port": 80}`},
		{`{"pwd":12345,"token":true}`, `{"pwd":"REDACTED","token":"REDACTED"}`},
		{`{"note":"{\"token\":\"PLANT PLANT\"}"}`, `{"note":"{\"token\":\"REDACTED\"}"}`},
		{"secret='PLANT PLANT'", "secret='REDACTED'"},
		{"--influx-token PLANT --v 2", "--influx-token REDACTED --v 2"},
		{"AWS AKIAIOSFODNN7EXAMPLE ghp_0123456789abcdef", "AWS REDACTED REDACTED"},
		{"Set-Cookie: a=PLANT; b", "Set-Cookie: REDACTED"},
		{`"by_cookie":17`, `"by_cookie":17`},
		{"msg=\"no secret found\" token bucket", "msg=\"no secret found\" token bucket"},
	} {
		if got := r.Text(row.text); got != row.want {
			t.Errorf("%q\n got %q\nwant %q", row.text, got, row.want)
		}
		if got := r.Text(r.Text(row.text)); got != row.want {
			t.Errorf("twice: %q", got)
		}
	}
	got := strings.Join(r.Args([]string{"spillway", "--token", "PLANT", "--v", "2", "--influx-url=http://u:PLANT@h/"}), " ")
	if want := "spillway --token REDACTED --v 2 --influx-url=http://REDACTED@h/"; got != want {
		t.Errorf("arguments: %q, want %q", got, want)
	}
	if got := Environment([]string{"PATH=/bin", "INFLUX_TOKEN=PLANT", "no"}); len(got) != 1 || got[0] != "PLANT" {
		t.Errorf("environment: %q", got)
	}
}

// The author of a Service chooses texts that problems quote. They remove nothing of others.
func TestATextRemovesNoOtherLines(t *testing.T) {
	for _, row := range [][2]string{
		{"-----END A PRIVATE KEY-----", "x"},
		{"-----BEGIN A PRIVATE KEY-----", "x"},
		{"-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"},
		{"secret='", "'"},
		{"token: |", "x"},
	} {
		text := fmt.Sprintf("level=WARN msg=\"the first\"\nlevel=WARN msg=%q\nlevel=WARN msg=\"the middle\"\nlevel=WARN msg=%q\nlevel=WARN "+
			"msg=\"the last\"\n",
			fmt.Sprintf("team/web: %q is not a way", row[0]), fmt.Sprintf("team/web: %q is not a way", row[1]))
		got := NewRedactor().Text(text)
		for _, want := range []string{"the first", "the middle", "the last"} {
			if !strings.Contains(got, want) {
				t.Errorf("%q removes %q: %q", row, want, got)
			}
		}
	}
	// A key in a log, with the time before each line.
	const key = "2026-11-23T10:00:00.1Z stdout F -----BEGIN PRIVATE KEY-----\n2026-11-23T10:00:00.1Z stdout F " +
		"PLANT+/=\n2026-11-23T10:00:00.1Z stdout F -----END PRIVATE KEY-----\n"
	for _, text := range []string{key, key[:90], key[70:]} {
		if got := NewRedactor().Text(text); strings.Contains(got, "PLANT") {
			t.Errorf("%q: %q", text, got)
		}
	}
}

// Redacted JSON is JSON still, whatever its names and values are.
func FuzzRedactedJSON(f *testing.F) {
	f.Add("token", `a"b`)
	f.Add("password", `\`)
	f.Add("plain", "Bearer 12345678")
	f.Fuzz(func(t *testing.T, name, value string) {
		secret := name + "_token"
		text, err := json.MarshalIndent(map[string]any{secret: value, "n": map[string]any{"x_token": 12, "list": []any{value, true}}}, "", " ")
		if err != nil || !utf8.ValidString(name) {
			return
		}
		var got map[string]any
		redacted := NewRedactor().Text(string(text))
		if err := json.Unmarshal([]byte(redacted), &got); err != nil {
			t.Fatalf("%s\n%s\n%v", text, redacted, err)
		}
	})
}

// read returns the files of an archive.
func read(t *testing.T, archive []byte) map[string]string {
	t.Helper()
	packed, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(packed); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[header.Name] = string(text)
	}
}

func TestFailuresAndLimitsAreInTheIndex(t *testing.T) {
	forever := make(chan struct{})
	defer close(forever)
	lines := func(n int) func(context.Context, io.Writer) error {
		return func(_ context.Context, w io.Writer) error {
			for i := range n {
				if _, err := fmt.Fprintf(w, "line %03d\n", i); err != nil {
					return err
				}
			}
			return nil
		}
	}
	c := Config{Name: "dump", FileLimit: 100, Collectors: []Collector{
		{File: "good", Collect: lines(3)},
		{File: "large", Collect: lines(1000)},
		{File: "bad", Collect: func(context.Context, io.Writer) error { return errors.New("no: token=PLANT\nsecond") }},
		{File: "part", Collect: func(_ context.Context, w io.Writer) error { fmt.Fprintln(w, "half"); return errors.New("no") }},
		{File: "panics", Collect: func(context.Context, io.Writer) error { panic("oh") }},
		{File: "slow", Timeout: 10 * time.Millisecond, Collect: func(ctx context.Context, _ io.Writer) error { <-ctx.Done(); return ctx.Err() }},
		{File: "hangs", Timeout: 10 * time.Millisecond, Collect: func(_ context.Context, w io.Writer) error {
			fmt.Fprintln(w, "begun")
			<-forever
			return nil
		}},
	}}
	var archive bytes.Buffer
	index, err := Write(t.Context(), &archive, c)
	if err != nil {
		t.Fatal(err)
	}
	files := read(t, archive.Bytes())
	var written Index
	if err := json.Unmarshal([]byte(files["dump/index.json"]), &written); err != nil || len(written.Files) != len(index.Files) {
		t.Fatalf("%v: %s", err, files["dump/index.json"])
	}
	for i, want := range []Entry{
		{File: "good", Bytes: 27},
		{File: "large", Bytes: 99, Cut: true},
		{File: "bad", Error: "no: token=REDACTED second"},
		{File: "part", Bytes: 5, Error: "no"},
		{File: "panics", Error: "collector failed: oh"},
		{File: "slow", Error: "not done after 10ms"},
		{File: "hangs", Bytes: 6, Error: "not done after 10ms"},
	} {
		if got := index.Files[i]; got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		if got, ok := files["dump/"+want.File]; len(got) != want.Bytes || ok != (want.Bytes > 0) {
			t.Errorf("%s: %d bytes, want %d", want.File, len(got), want.Bytes)
		}
	}
	if len(index.Failed()) != 5 {
		t.Errorf("failed: %+v", index.Failed())
	}
}

func TestTheWholeArchiveIsBounded(t *testing.T) {
	c := Config{Name: "dump", FileLimit: 1000, Limit: 5000}
	for i := range 50 {
		c.Collectors = append(c.Collectors, Collector{File: fmt.Sprint(i), Collect: func(_ context.Context, w io.Writer) error {
			_, err := io.WriteString(w, strings.Repeat("nine char\n", 200))
			return err
		}})
	}
	index, err := Write(t.Context(), io.Discard, c)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	for _, e := range index.Files {
		sum += e.Bytes
		if !e.Cut {
			t.Errorf("%+v", e)
		}
	}
	if sum != c.Limit {
		t.Errorf("%d bytes, want %d", sum, c.Limit)
	}
}

func TestAnInterruptEndsTheArchive(t *testing.T) {
	ctx, stop := context.WithCancelCause(t.Context())
	c := Config{Collectors: []Collector{{File: "x", Collect: func(ctx context.Context, _ io.Writer) error {
		stop(errors.New("interrupt"))
		<-ctx.Done()
		return ctx.Err()
	}}}}
	if _, err := Write(ctx, io.Discard, c); err == nil || err.Error() != "collect: interrupt" {
		t.Error(err)
	}
	if _, err := Write(t.Context(), &limited{}, Config{Collectors: []Collector{}}); err == nil {
		t.Error("a full disk is no error")
	}
}
