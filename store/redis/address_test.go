package redis

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAnAddressIsReadWithItsDefaults(t *testing.T) {
	for _, tt := range []struct {
		url  string
		want address
	}{
		{"redis://localhost", address{hosts: []string{"localhost:6379"}}},
		{"redis://localhost:1/", address{hosts: []string{"localhost:1"}}},
		{"redis://10.0.0.1:7000/3", address{hosts: []string{"10.0.0.1:7000"}, db: 3}},
		{"redis://[::1]", address{hosts: []string{"[::1]:6379"}}},
		{"redis://[::1]:7000/3", address{hosts: []string{"[::1]:7000"}, db: 3}},
		{"redis://weir:s%40%3A%2Fx@h", address{hosts: []string{"h:6379"}, user: "weir", password: "s@:/x"}},
		{"redis://:secret@h", address{hosts: []string{"h:6379"}, password: "secret"}},
		{"redis://weir@h", address{hosts: []string{"h:6379"}, user: "weir"}},
		{"rediss://h:7000", address{hosts: []string{"h:7000"}, tls: true}},
		{"unix:///run/redis.sock", address{network: "unix", hosts: []string{"/run/redis.sock"}}},
		{"unix://weir:secret@/run/my%20redis?db=2", address{network: "unix", hosts: []string{"/run/my redis"}, user: "weir", password: "secret", db: 2}},
		{"redis+sentinel://a/main", address{topology: sentinels, hosts: []string{"a:26379"}, primary: "main"}},
		{"redis+sentinel://u:p@a,b:1,[::1],[::2]:3/main/7", address{
			topology: sentinels, hosts: []string{"a:26379", "b:1", "[::1]:26379", "[::2]:3"},
			primary: "main", user: "u", password: "p", db: 7,
		}},
		{"rediss+sentinel://a/main/", address{topology: sentinels, hosts: []string{"a:26379"}, primary: "main", tls: true}},
		{"redis+cluster://a,b:1", address{topology: cluster, hosts: []string{"a:6379", "b:1"}}},
		{"rediss+cluster://u:p@a/", address{topology: cluster, hosts: []string{"a:6379"}, user: "u", password: "p", tls: true}},
	} {
		if tt.want.network == "" {
			tt.want.network = "tcp"
		}
		got, err := parseAddress(tt.url)
		if err != nil {
			t.Errorf("parseAddress(%q): %v", tt.url, err)
		} else if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(address{})); diff != "" {
			t.Errorf("parseAddress(%q) (-want +got):\n%s", tt.url, diff)
		}
	}
}

// Each error says what is wrong, and nothing of the URL, since a password may be
// anywhere in a wrong one.
func TestAWrongAddressIsAnErrorThatTellsNoPassword(t *testing.T) {
	const secret = "hunter2"
	for _, tt := range []struct{ url, want string }{
		{"", "no scheme"},
		{secret, "no scheme"},
		{"http://:hunter2@localhost", "scheme is unknown"},
		{"hunter2://localhost", "scheme is unknown"},
		{"redis://", "host that is empty"},
		{"redis://:6379", "host that is empty"},
		{"redis://user:hunter2@local host:6379", "host that is empty or not one"},
		{"redis://:hunter2@localhost:port", "port is not"},
		{"redis://:hunter2@localhost:99999", "port is not"},
		{"redis://:hunter2@localhost:0", "port is not"},
		{"redis://::1", "in brackets"},
		{"redis://[::1", "host that is empty or not one"},
		{"redis://[hunter2]", "no IPv6 address"},
		{"redis://user:hunter2#x@localhost:6379", "%23"},
		{"redis://user:hunter2/x@localhost:6379", "%2F"},
		{"redis://user:hunter2@x@localhost:6379", "%40"},
		{"redis://user:hunter2:x@localhost:6379", "%3A"},
		{"redis://user:%hunter2@localhost:6379", "%25"},
		{"redis://user:x:hunter2?@localhost", "%3F"},
		{"redis://localhost:6379/hunter2", "database"},
		{"redis://localhost:6379/0/hunter2", "database"},
		{"redis://localhost:6379/-1", "database"},
		{"redis://localhost:6379?dial_timeout=hunter2", "parameters"},
		{"redis://:hunter2@localhost:6379/0?db=1", "parameters"},
		{"redis://a,b", "several hosts"},
		{"unix://", "unix://"},
		{"unix://host/hunter2", "unix://"},
		{"unix:///run/s?db=hunter2", "database"},
		{"unix:///run/s?db=1&password=hunter2", "database"},
		{"unix:///run/s?pool_size=1", "parameters"},
		{"redis+sentinel://:hunter2@a:1,b:2", "primary"},
		{"redis+sentinel://:hunter2@a:1,/x", "host that is empty"},
		{"redis+sentinel://a/x/hunter2", "database"},
		{"redis+cluster://:hunter2@a,b/1", "a cluster has only 0"},
		{"redis+cluster://a,hunter2:b", "port is not"},
		{"redis+cluster://a?addr=hunter2", "parameters"},
	} {
		_, err := parseAddress(tt.url)
		switch {
		case err == nil:
			t.Errorf("parseAddress(%q) succeeded, want %q", tt.url, tt.want)
		case !strings.Contains(err.Error(), tt.want):
			t.Errorf("parseAddress(%q): %v, want %q", tt.url, err, tt.want)
		case strings.Contains(err.Error(), secret):
			t.Errorf("parseAddress(%q): the error tells the password: %v", tt.url, err)
		}
	}
}

func TestAddressHasNoUserAndNoPassword(t *testing.T) {
	for url, want := range map[string]string{
		"":                                      "",
		"redis://example.org":                   "example.org:6379",
		"rediss://u:secret@example.org:7000/3":  "example.org:7000",
		"unix://u:secret@/run/redis.sock":       "/run/redis.sock",
		"redis+cluster://:secret@a:1,b:2":       "a:1,b:2",
		"redis+sentinel://u:secret@a,b/primary": "a:26379,b:26379",
		"redis://u:sec/ret@example.org":         "",
	} {
		if got := Address(url); got != want {
			t.Errorf("Address(%q) = %q, want %q", url, got, want)
		}
	}
}
